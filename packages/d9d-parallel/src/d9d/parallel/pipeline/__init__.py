"""Pipeline parallelism: schedules as data, a simulator that proves them, and an executor that runs them."""

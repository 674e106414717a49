"""One rank of `test_gpu`, under torchrun: steps over NCCL give the update of one process."""

import sys

from test_step import VALID, assert_same, reference, step_of

from d9d.mesh import DistContext, MeshConfig

for layout in sys.argv[1:]:
    degrees = dict(pair.split("=") for pair in layout.split(","))
    with DistContext.launch(MeshConfig(**{name: int(degree) for name, degree in degrees.items()}), "cuda") as context:
        expected = reference(device="cuda")
        for bucket_bytes in (1, 32 << 20):
            assert_same(step_of(context, 2, VALID, bucket_bytes), expected)

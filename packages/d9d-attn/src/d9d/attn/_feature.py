"""The vocabulary of the capability table."""

import enum


class Feature(enum.StrEnum):
    """What a backend may or may not be able to do."""

    GROUPED_QUERY = "fewer key heads than query heads"
    VALUE_DIM = "values of another head dim than keys"
    WINDOW = "sliding windows"
    DOCUMENTS = "packed documents"
    BOOLEAN_BIAS = "boolean bias"
    ADDITIVE_BIAS = "additive bias"
    BIAS_GRADIENT = "gradient of an additive bias"
    SINKS = "sinks"
    SOFT_CAP = "soft cap"
    DROPOUT = "dropout"
    LSE = "log-sum-exp"
    LSE_GRADIENT = "gradient through the log-sum-exp"

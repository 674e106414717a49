"""Certificates: proof that a layout trains as one process does, for anybody's model, layout and loop.

`certify` runs layouts on this machine's CPU; ``python -m d9d.parallel.certify --help`` does so from the command line.
In `d9d.parallel` the name is that of the function: import what is here with ``from d9d.parallel.certify import …``.
"""

from ._certificate import Certificate, CertificateError
from ._certify import certify
from ._comparison import Comparison, Quantity
from ._layout_result import Failure, LayoutResult
from ._loop import GradientDescent, default_loop
from ._meshes import every_mesh, parse_mesh
from ._protocols import Loop, Step, StepResult
from ._staged import Staged

__all__ = [
    "Certificate",
    "CertificateError",
    "Comparison",
    "Failure",
    "GradientDescent",
    "LayoutResult",
    "Loop",
    "Quantity",
    "Staged",
    "Step",
    "StepResult",
    "certify",
    "default_loop",
    "every_mesh",
    "parse_mesh",
]

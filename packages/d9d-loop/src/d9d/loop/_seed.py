"""Random state of a rank."""

from hashlib import blake2b

import torch

from d9d.mesh import DistContext


def seed_rank(ctx: DistContext, *, seed: int, step: int) -> None:
    """Seed torch's random state for a run that goes on after `step`.

    Ranks that hold different data draw different numbers; ranks of one tensor-parallel group draw the same.
    """
    mesh = ctx.mesh("batch")
    place = "/".join(str(mesh.get_local_rank(dim)) for dim in ("pp", "dp", "cp"))
    digest = blake2b(f"{seed}/{place}/{step}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little", signed=True))

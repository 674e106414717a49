"""The certificate: what is right passes, and what proves nothing is refused."""

import sys
from pathlib import Path

import pytest
import torch

from d9d.mesh import MeshConfig
from d9d.parallel import CertificateError, certify
from d9d.parallel.certify import Quantity, every_mesh, parse_mesh

sys.path.insert(0, str(Path(__file__).parent))
from certified_models import by_hand_case, make_batch, sound


def test_layouts_that_are_right_pass_and_refused_ones_are_no_passes():
    impossible = MeshConfig(replicate=4, expert=3)
    meshes = [*every_mesh(4, ["replicate", "shard", "expert"]), MeshConfig(tensor=4), impossible]
    certificate = certify(**sound(), meshes=meshes)
    assert [layout.verdict for layout in certificate.layouts] == ["passed"] * 9 + ["refused"] * 2
    for layout in certificate.layouts[:9]:
        assert {c.rank for c in layout.comparisons} == {0, 1, 2, 3}
        assert {c.microbatches for c in layout.comparisons} == {1, 2}
        names = {c.name for c in layout.comparisons if c.quantity is Quantity.GRADIENT}
        assert names == {
            "embed.weight",
            "head.weight",
            "experts.weight",
            "experts.router.weight",
            "experts.router.bias",
        }
        assert {c.quantity for c in layout.comparisons} == set(Quantity)
    certificate.check(allow_refused=True)
    with pytest.raises(CertificateError, match="tensor 4 was refused: laid out over replicate, shard and expert only"):
        certificate.check()
    report = str(certificate)
    assert "9 passed, 0 failed, 2 refused" in report
    assert "mesh.expert = 3 does not fold" in report
    assert "| replicate 2 · shard 2 · expert 4 | 4 | passed |" in certificate.markdown()
    assert "| tensor 4 | 4 | refused: laid out over" in certificate.markdown()
    assert "experts.router.bias" in certificate.parameters()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, foreach=False)


def test_a_loop_that_uses_nothing_of_this_package_passes():
    certify(**by_hand_case(optimizer=adamw), meshes=[MeshConfig(replicate=2)]).check()


def test_what_proves_nothing_or_cannot_be_run_is_refused():
    mesh = [MeshConfig(replicate=2)]
    with pytest.raises(ValueError, match="loss is <function .*lambda.* give a function"):
        certify(**sound(loss=lambda module, batch: None), meshes=mesh)
    with pytest.raises(ValueError, match="leaves a degree open"):
        certify(**sound(), meshes=[MeshConfig(replicate=-1)])
    with pytest.raises(ValueError, match=r"the batch has a weight of 0.0"):
        certify(**sound(batch=make_batch((0, 0))), meshes=mesh)
    with pytest.raises(ValueError, match="there is no degree experts"):
        every_mesh(2, ["experts"])
    with pytest.raises(ValueError, match="'replicas=2' in the mesh 'replicas=2' is not one of pipeline=N"):
        parse_mesh("replicas=2")


def test_notes_say_what_is_not_tested():
    even = (torch.arange(8).view(4, 2), torch.arange(8).view(4, 2))
    certificate = certify(**sound(batch=even), meshes=[MeshConfig(replicate=2)], microbatches=[1])
    certificate.check()
    assert "Note: 2 parts of the batch weigh the same, so a mean of their means would pass." in str(certificate)

"""Backends of the loss say what they cannot, and arguments that do not go together are refused."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from d9d.models import (
    CutLinearCrossEntropyConfig,
    LinearCrossEntropyNeed,
    TorchLinearCrossEntropyConfig,
    TritonLinearCrossEntropyConfig,
    linear_cross_entropy,
    linear_cross_entropy_backends,
)

sys.path.insert(0, str(Path(__file__).parent))
from loss_cases import case, oracle, weighted_sum


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"labels": torch.ones(2, dtype=torch.int64)},
            r"needs labels \(2, 3\) and a weight \(V, 4\), got labels \(2,\)",
        ),
        ({"weight_VH": torch.ones(5, 4).bfloat16()}, r"hidden is torch.float32 and the weight is torch.bfloat16: cast"),
        ({"bias_V": torch.ones(4)}, r"a weight of 5 classes needs a bias of as many, got \(4,\)"),
        ({"token_weights": torch.ones(2)}, r"token_weights are \(2,\) on cpu, labels \(2, 3\) on cpu"),
        ({"labels": torch.full((2, 3), 5)}, r"the label 5 is none of 5 classes, nor ignored \(-100\)"),
        ({"labels": torch.full((2, 3), -1)}, r"the label -1 is none of 5 classes"),
        ({"labels": torch.zeros(2, 3)}, "labels are torch.float32: give them as int64 or int32"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and less than 1"),
        ({"z_loss": -1.0}, "z_loss=-1.0 must not be negative"),
        ({"z_loss": torch.nan}, "z_loss=nan must not be negative, and finite"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be greater than 0"),
        ({"soft_cap": torch.inf}, "soft_cap=inf must be greater than 0 and finite"),
        (
            {"hidden": torch.ones(2, 3, 4).long(), "weight_VH": torch.ones(5, 4).long()},
            "hidden is torch.int64: give it in a floating dtype",
        ),
        ({"weight_VH": torch.ones(5, 4, device="meta")}, "hidden is on cpu, weight on meta: bring them together"),
        ({"labels": torch.zeros(2, 3, device="meta").long()}, "hidden is on cpu, labels on meta"),
        (
            {"token_weights": torch.ones(2, 3, device="meta")},
            r"token_weights are \(2, 3\) on meta, labels \(2, 3\) on cpu",
        ),
        ({"backend": "tritn"}, r"unknown linear cross-entropy backend 'tritn', .* did you mean 'triton'"),
        ({"backend": "triton"}, r"'triton', asked for in the configuration, runs on \['cuda'\] only"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    arguments = {"hidden": torch.ones(2, 3, 4), "weight_VH": torch.ones(5, 4), "labels": torch.zeros(2, 3).long()}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(arguments | changes))


def test_backends_say_what_they_cannot():
    choose = linear_cross_entropy_backends.choose
    assert choose(None, LinearCrossEntropyNeed(device_type="cuda", dtype=torch.bfloat16)).config.kind == "torch"
    triton = TritonLinearCrossEntropyConfig()
    assert triton.refusal(LinearCrossEntropyNeed(device_type="cuda", features=frozenset({"bias", "z_loss"}))) is None
    assert "not torch.float64" in triton.refusal(LinearCrossEntropyNeed(dtype=torch.float64))
    cut = CutLinearCrossEntropyConfig()
    assert "d9d-models[cce]" in cut.refusal(LinearCrossEntropyNeed())
    with pytest.raises(ImportError, match=r"d9d-models\[cce\]"):
        cut.build()


class Called:
    """cut-cross-entropy with the parameters of 25.1, or of later ones; keeps the settings it was called with."""

    def __init__(self, version):
        self.settings = None
        self.linear_cross_entropy = self.early if version == "early" else self.late

    def early(self, e, c, targets, *, ignore_index, softcap, reduction, filter_eps):
        self.settings = {"filter_eps": filter_eps}
        return F.cross_entropy(e @ c.T, targets, ignore_index=ignore_index, reduction=reduction)

    def late(self, e, c, targets, *, ignore_index, softcap, reduction, filter_eps, accum_e_fp32, accum_c_fp32):
        self.settings = {"filter_eps": filter_eps, "accum_e_fp32": accum_e_fp32, "accum_c_fp32": accum_c_fp32}
        return F.cross_entropy(e @ c.T, targets, ignore_index=ignore_index, reduction=reduction)


@pytest.mark.parametrize(
    ("version", "settings"),
    [("early", {"filter_eps": None}), ("late", {"filter_eps": None, "accum_e_fp32": True, "accum_c_fp32": True})],
)
def test_cut_cross_entropy_is_called_as_its_version_wants(monkeypatch, version, settings):
    called = Called(version)
    module = type(sys)("cut_cross_entropy")
    module.linear_cross_entropy = called.linear_cross_entropy
    module.__spec__ = ModuleSpec("cut_cross_entropy", None)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)
    monkeypatch.setattr(
        CutLinearCrossEntropyConfig, "capabilities", TorchLinearCrossEntropyConfig.capabilities
    )  # the CPU will do for this
    sample = case((9,), 11, weighted=True)
    loss = linear_cross_entropy(
        sample.hidden, sample.weight, sample.labels, token_weights=sample.token_weights, backend="cce"
    )
    torch.testing.assert_close(loss.sum, weighted_sum(oracle(sample), sample), check_dtype=False)
    assert called.settings == settings

"""Saving and loading of compacted models."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import proxmo
from compaction.models import CASES, call, make
from compaction.test_compact import zero_units
from proxmo import GroupL2, ProxSGD, compact, load_compact, save_compact, unit_groups
from proxmo.compaction.errors import require_package


def compacted(name: str) -> nn.Module:
    """Return a compacted model, from one with 60% of its units zero."""
    model, example = make(name)
    if CASES[name][2]:
        zero_units(ProxSGD(unit_groups(model, example, GroupL2(0.1))), 0.6)
    return compact(model.eval(), example)[0]


@pytest.mark.parametrize("name", list(CASES))
def test_model_round_trips(name: str, tmp_path: Path) -> None:
    small = compacted(name)
    path = tmp_path / "small.safetensors"
    save_compact(small, path)
    assert [file.name for file in tmp_path.iterdir()] == ["small.safetensors"]
    other, example = make(name)
    before = copy.deepcopy(other.state_dict())
    loaded = load_compact(other.eval(), path)
    assert str(loaded) == str(small)  # shows all sizes
    for a, b in zip(call(small, example), call(loaded, example), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), other.state_dict().values(), strict=True))
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in small.named_parameters()]


def test_bias_added_by_compaction_round_trips(tmp_path: Path) -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, 2, bias=False))

    model = network()
    with torch.no_grad():
        model[0].weight[:2] = 0
    small, _ = compact(model, torch.randn(4, 3))
    assert small[2].bias is not None  # type: ignore[index]
    save_compact(small, tmp_path / "small.safetensors")
    loaded = load_compact(network(), tmp_path / "small.safetensors")
    inputs = torch.randn(4, 3)
    assert torch.equal(loaded(inputs), small(inputs))


def test_tied_and_frozen_parameters_round_trip(tmp_path: Path) -> None:
    small = compacted("tied")
    save_compact(small, tmp_path / "small.safetensors")
    other, _ = make("tied")
    other.hidden.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    loaded = load_compact(other, tmp_path / "small.safetensors")
    assert loaded.head.weight is loaded.embedding.weight  # type: ignore[union-attr]
    assert not loaded.hidden.weight.requires_grad  # type: ignore[union-attr]


def test_files_of_other_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    save_compact(nn.Sequential(nn.Linear(2, 3)), path)
    with pytest.raises(
        ValueError, match=r"does not match the model: missing tensors \['1.weight', '1.bias'\], unexpected tensors \[\]"
    ):
        load_compact(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), path)
    with pytest.raises(ValueError, match=r"missing tensors \[\], unexpected tensors \['0.bias', '0.weight'\]"):
        load_compact(nn.Sequential(), path)
    with pytest.raises(ValueError, match=r"has shape \(3, 2\) for '0.weight', incompatible with \(3, 2, 1\)"):
        load_compact(nn.Sequential(nn.Conv1d(2, 3, 1)), path)
    small = compacted("Transformer")
    save_compact(small, path)
    with pytest.raises(ValueError, match="needs a module 'layers"):
        load_compact(nn.Linear(2, 3), path)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    model = nn.Linear(2, 3)
    save_compact(model, path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
        load_compact(model, path)
    save_file({"weight": torch.ones(3, 2)}, path)
    with pytest.raises(ValueError, match="was not written by save_compact"):
        load_compact(model, path)
    torch.save(model.state_dict(), path)  # a pickle is refused without being loaded
    with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
        load_compact(model, path)
    with pytest.raises(FileNotFoundError):
        save_compact(model, tmp_path / "missing" / "small.safetensors")


@pytest.mark.parametrize("heads", [None, "{", "[1]", '{"a": ["x", 4]}', '{"a": [1000000, 40000]}', '{"": [1, -1]}'])
def test_invalid_heads_in_the_metadata_are_refused(heads: str | None, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    metadata = {"format": "proxmo-compact-1", **({} if heads is None else {"heads": heads})}
    save_file({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, path, metadata)
    with pytest.raises(ValueError, match="is damaged: invalid attention heads"):
        load_compact(nn.Linear(2, 3), path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"weight": torch.ones(2, 2), "bias": torch.ones(3)},
            r"inconsistent sizes for a Linear: \{2, 3\}",
        ),
        ({"weight": torch.ones(9, 2), "bias": torch.ones(9)}, r"has shape \(9,\) for 'bias', incompatible with \(3,\)"),
        ({"weight": torch.ones(3, 2).long(), "bias": torch.ones(3)}, r"has shape \(3, 2\) for 'weight'"),
    ],
)
def test_tensors_that_pruning_cannot_produce_are_refused(
    tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "small.safetensors"
    save_file(dict(sorted(tensors.items(), reverse=True)), path, {"format": "proxmo-compact-1", "heads": "{}"})
    with pytest.raises(ValueError, match=message):
        load_compact(nn.Linear(2, 3), path)


def test_rng_state_is_unchanged(tmp_path: Path) -> None:
    save_compact(compacted("Transformer"), tmp_path / "small.safetensors")
    other, _ = make("Transformer")
    state = torch.get_rng_state()
    load_compact(other, tmp_path / "small.safetensors")
    assert torch.equal(state, torch.get_rng_state())


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No such directory: .*missing$"):
        save_compact(nn.Linear(2, 2), tmp_path / "missing" / "small.safetensors")


def test_models_that_are_not_modules_are_refused(tmp_path: Path) -> None:
    for save_or_load in (lambda: save_compact(5, tmp_path / "x"), lambda: load_compact(None, tmp_path / "x")):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"model must be an nn\.Module, got"):
            save_or_load()


def test_extra_state_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 1}

        def set_extra_state(self, state: object) -> None: ...

    with pytest.raises(TypeError, match="must have only tensors in its state_dict, got dict for '_extra_state'"):
        save_compact(Extra(2, 2), tmp_path / "small.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_missing_package_error_has_an_install_hint() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"compacted models needs not-there: pip install 'proxmo\[compact\]'"):
        require_package("not-there")


def test_model_that_was_not_compacted_round_trips(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    proxmo.save_compact(model, tmp_path / "whole.safetensors")
    loaded = load_compact(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), str(tmp_path / "whole.safetensors"))
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )

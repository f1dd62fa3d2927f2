"""Compacted transformers generate the same, and the residual width is cut where the norms allow it."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from compaction import huggingface
from compaction.handwritten import GroupedQueries
from compaction.test_architectures import outputs, set_zero
from proxmo import GroupL2, compact, load_compact, save_compact, unit_groups


def every_second(size: int) -> list[int]:
    return list(range(0, size - 1, 2))


def compacted_decoder(name: str, **options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = huggingface.language_model(name, **options).eval()
    example = huggingface.tokens(2, 7)
    set_zero(unit_groups(model, example, GroupL2(0.1)), every_second)
    return model, compact(model, example)[0]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_residual_width_is_cut_and_generation_is_the_same(name: str, tmp_path: Path) -> None:
    model, small = compacted_decoder(name, num_key_value_heads=2, head_dim=8)
    assert small.model.embed_tokens.weight.shape == (64, 16)  # type: ignore[union-attr]
    tokens = torch.randint(3, 60, (3, 5))
    expected = model.generate(tokens, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    assert torch.equal(small.generate(tokens, max_new_tokens=8, do_sample=False), expected)  # type: ignore[operator]
    torch.testing.assert_close(small(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
    save_compact(small, tmp_path / "small.safetensors")
    options = {"num_key_value_heads": 2, "head_dim": 8}
    loaded = load_compact(huggingface.language_model(name, **options).eval(), tmp_path / "small.safetensors")
    assert torch.equal(loaded(tokens).logits, small(tokens).logits)


def test_residual_width_is_cut_exactly_in_double_precision() -> None:
    torch.manual_seed(0)
    model = GroupedQueries().double().eval()
    tokens = torch.randint(0, 20, (2, 6))
    groups = unit_groups(model, tokens, GroupL2(0.1))
    assert any("16 units" in note and note.endswith(": embedding") for note in groups.notes)
    set_zero(groups, every_second)
    small, report = compact(model, tokens)
    assert report.attributes["norm.eps"] == (1e-6, pytest.approx(2e-6))
    assert "set norm.eps: 1e-06 → 2e-06" in str(report)
    other = torch.randint(0, 20, (3, 9))
    torch.testing.assert_close(small(other), model(other), rtol=1e-10, atol=1e-10)
    again, report = compact(small, tokens)  # nothing is left to remove
    assert report.parameters[0] == report.parameters[1]
    assert torch.equal(again(other), small(other))


def test_numbers_of_modules_are_set_and_reported() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = huggingface.model_with("GPT2LMHeadModel", "GPT2Config", **sizes).eval()
    example = huggingface.tokens(2, 7)
    set_zero(unit_groups(model, example, GroupL2(0.1)), every_second)
    small, report = compact(model, example)
    assert report.attributes["transformer.h.1.attn.split_size"] == (32, 16)
    assert report.widths["transformer.h.0.mlp.c_fc"] == (128, 64)
    assert report.widths["transformer.h.0.attn.c_attn"] == (96, 48)
    assert small.transformer.h[0].attn.c_attn.nf == 48  # type: ignore[union-attr, index]
    tokens = torch.randint(3, 60, (3, 5))
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    actual = small.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    assert torch.equal(actual, expected)
    compiled = torch.compile(small, backend="eager")
    torch.testing.assert_close(outputs(compiled, {"input_ids": tokens})[0], small(tokens).logits)
    loss = small(tokens, labels=tokens).loss  # training can continue
    loss.backward()
    assert all(p.grad is not None for p in small.parameters())


class BranchOnSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden.sigmoid() if len(x) > 4 else hidden)


class BranchOnValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(2 * hidden if x.sum() > 0 else hidden)


def test_branches_on_sizes_are_followed_and_those_on_values_are_named() -> None:
    torch.manual_seed(0)
    model = BranchOnSize().eval()
    with torch.no_grad():
        model.first.weight[:3], model.first.bias[:3] = 0, 0
    small, _ = compact(model, torch.randn(2, 3))
    for batch in (2, 9):
        x = torch.randn(batch, 3)
        torch.testing.assert_close(small(x), model(x))
    note = "the model: its code branches on values of the inputs"
    assert any(line.startswith(note) for line in compact(BranchOnValue(), torch.randn(2, 3))[1].kept)
    assert any(line.startswith(note) for line in unit_groups(BranchOnValue(), torch.randn(2, 3), GroupL2(0.1)).notes)


def test_models_with_active_masks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(ValueError, match=r"no active masks of torch\.nn\.utils\.prune, got one on '0': prune\.remove"):
        compact(model, torch.randn(2, 3))


def test_models_of_another_input_size_are_refused(tmp_path: Path) -> None:
    def network(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, 2))

    small, _ = compact(network(3), torch.randn(2, 3))
    save_compact(small, tmp_path / "small.safetensors")
    with pytest.raises(ValueError, match=r"whose '0.weight' had shape \(4, 3\) before .*, got .* \(4, 5\)"):
        load_compact(network(5), tmp_path / "small.safetensors")


def test_swapped_arguments_do_not_print_tensors() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(TypeError, match=r"such as GroupL2\(0\.1\), got Tensor"):
        unit_groups(model, GroupL2(0.1), torch.randn(2, 3))  # type: ignore[arg-type]


def test_operations_without_a_rule_cost_what_they_touch() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third, self.last = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.linalg.matrix_exp(torch.diag_embed(self.first(x))).sum(-1)
            return self.last(functional.gelu(self.third(functional.gelu(self.second(hidden)))))

    notes = unit_groups(Sorted(), torch.randn(2, 6), GroupL2(0.1)).notes
    assert [note for note in notes if note.startswith("not penalised: first:")]
    assert [note for note in notes if note.endswith((": second", ": third"))]


def test_model_is_copied_with_its_notes() -> None:
    model, small = compacted_decoder("LlamaForCausalLM")
    tokens = torch.randint(3, 60, (2, 4))
    assert torch.equal(copy.deepcopy(small)(tokens).logits, small(tokens).logits)
    assert model.model.embed_tokens.weight.shape == (64, 32)  # type: ignore[union-attr]


class LogitsOnly(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits  # type: ignore[no-any-return]


def test_residual_width_of_t5_is_cut_if_hidden_states_are_not_outputs() -> None:
    torch.manual_seed(0)
    model = LogitsOnly(huggingface.MODELS["T5"][0]()).eval()
    example = huggingface.two_sequences(2, 7)
    set_zero(unit_groups(model, example, GroupL2(0.1)), every_second)
    small, _ = compact(model, example)
    assert small.get_parameter("model.shared.weight").shape == (64, 16)
    other = huggingface.two_sequences(3, 9)
    torch.testing.assert_close(small(**other), model(**other), rtol=1e-4, atol=1e-5)


def test_query_heads_with_one_head_of_keys_go_if_nothing_reads_them() -> None:
    class MultiQuery(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 4
            self.q, self.kv, self.out = nn.Linear(6, 16), nn.Linear(6, 8), nn.Linear(16, 6)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).view(*x.shape[:2], self.heads, 4).transpose(1, 2)
            k, v = self.kv(x)[:, None].split(4, -1)
            weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = MultiQuery().double().eval()
    with torch.no_grad():
        model.out.weight[:, 4:12] = 0
    small, report = compact(model, torch.randn(2, 5, 6).double())
    assert report.widths["q"] == (16, 8)
    x = torch.randn(3, 7, 6).double()
    torch.testing.assert_close(small(x), model(x), rtol=1e-10, atol=1e-10)

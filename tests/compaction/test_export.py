"""Compacted models can be exported to ONNX, compiled and copied."""

import copy
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from compaction import huggingface
from compaction.models import call, make
from compaction.test_architectures import set_zero
from compaction.test_serialization import compacted
from proxmo import GroupL2, compact, unit_groups


@pytest.mark.parametrize(
    "name",
    [
        "ResNet",
        "Transformer",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("two layers", "depthwise", "concatenated")),
    ],
)
def test_onnx_export_has_the_same_outputs(name: str, tmp_path: Path) -> None:
    small = compacted(name)
    _, example = make(name)
    path = tmp_path / "small.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        torch.onnx.export(small, (example,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: example.numpy()})
    np.testing.assert_allclose(output, call(small, example)[0].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ResNet", "Transformer"])
def test_compiled_and_copied_models_have_the_same_outputs(name: str) -> None:
    small = compacted(name)
    _, example = make(name)
    expected = call(small, example)[0]
    torch.testing.assert_close(call(torch.compile(small, backend="eager", fullgraph=True), example)[0], expected)
    assert torch.equal(call(copy.deepcopy(small), example)[0], expected)


def compacted_transformer(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = huggingface.MODELS[name][0]().eval()
    inputs = huggingface.MODELS[name][1](2, 7)
    set_zero(unit_groups(model, inputs, GroupL2(0.1)), lambda size: list(range(0, size - 1, 2)))
    small, report = compact(model, inputs)
    assert report.parameters[1] < report.parameters[0]
    return small, inputs


@pytest.mark.parametrize("name", ["BERT with masks", "Llama, grouped queries"])
def test_transformers_of_hugging_face_can_be_exported_and_compiled(name: str, tmp_path: Path) -> None:
    small, inputs = compacted_transformer(name)
    options = {"use_cache": False} if "Llama" in name else {}
    with torch.no_grad():
        expected = small(**inputs, **options).logits
        compiled = torch.compile(small, backend="eager", fullgraph=True)(**inputs, **options).logits
    torch.testing.assert_close(compiled, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        program = torch.onnx.export(small, kwargs={**inputs, **options}, dynamo=True, verbose=False)
    assert program is not None
    program.save(tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    output = session.run(None, {key: value.numpy() for key, value in inputs.items()})[0]
    np.testing.assert_allclose(output, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_encoder_and_decoder_generate_the_same_without_zero_units() -> None:
    torch.manual_seed(0)
    model = huggingface.MODELS["T5"][0]().eval()
    inputs = huggingface.MODELS["T5"][1](2, 7)
    set_zero(unit_groups(model, inputs, GroupL2(0.1)), lambda size: list(range(0, size - 1, 2)))
    small, _ = compact(model, inputs)
    options = {"max_new_tokens": 6, "num_beams": 2, "decoder_start_token_id": 1}
    tokens = torch.randint(3, 60, (3, 5))
    assert torch.equal(small.generate(tokens, **options), model.generate(tokens, **options))  # type: ignore[operator]

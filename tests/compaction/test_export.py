"""Compacted models can be exported to ONNX, compiled and copied."""

import copy
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from compaction.models import call, make
from compaction.test_serialization import compacted


@pytest.mark.parametrize("name", ["two layers", "ResNet", "depthwise", "concatenated", "Transformer"])
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

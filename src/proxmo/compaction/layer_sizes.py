"""Sizes that the layers of torch keep beside their tensors."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


def update_size_attributes(module: nn.Module) -> None:
    """Set attributes such as ``in_features`` from the shapes of the layer's tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _ConvNd):
        _update_convolution(module)
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    elif isinstance(module, _NormBase):
        tensors = [x for x in (module.weight, module.running_mean) if x is not None]
        module.num_features = len(tensors[0]) if tensors else module.num_features
    elif isinstance(module, nn.GroupNorm) and module.weight is not None:
        per_group = module.num_channels // module.num_groups
        module.num_channels = len(module.weight)
        module.num_groups = module.num_channels // per_group
    elif isinstance(module, nn.RMSNorm) and module.weight is not None:
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.RNNBase):
        weight = module.get_parameter("weight_ih_l0")
        module.input_size, module.hidden_size = weight.shape[1], weight.shape[0] // _gates(module)
    elif isinstance(module, nn.RNNCellBase):
        module.input_size, module.hidden_size = module.weight_ih.shape[1], module.weight_hh.shape[1]
    elif isinstance(module, nn.PReLU):
        module.num_parameters = module.weight.numel()


def _gates(module: nn.RNNBase) -> int:
    return {"LSTM": 4, "GRU": 3}.get(module.mode, 1)


def _update_convolution(module: _ConvNd) -> None:
    first, second = module.weight.shape[:2]
    if isinstance(module, _ConvTransposeNd):
        if module.groups > 1:  # only whole groups are removed
            module.groups = first // (module.in_channels // module.groups)
        module.in_channels, module.out_channels = first, second * module.groups
    else:
        if module.groups > 1:
            module.groups = first // (module.out_channels // module.groups)
        module.out_channels, module.in_channels = first, second * module.groups

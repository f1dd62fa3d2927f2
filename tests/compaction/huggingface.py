"""Models of Hugging Face with tiny configurations, and inputs of any batch size and length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Inputs = Callable[[int, int], dict[str, Tensor]]

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}
_GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48}
_SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_position_embeddings": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(batch, length)}


def masked_tokens(batch: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, -2:] = 0
    return {"input_ids": _tokens(batch, length), "attention_mask": mask}


def pixels(batch: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 16, 16)}


def large_pixels(batch: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def two_sequences(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(batch, length), "decoder_input_ids": _tokens(batch, length - 2)}


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, 60, (batch, length))


def language_model(name: str, **options: Any) -> nn.Module:
    """Return a model whose configuration has the usual names of sizes."""
    config = getattr(transformers, name.replace("ForCausalLM", "").replace("Model", "") + "Config")
    return getattr(transformers, name)(config(**{**_SIZES, **options}))  # type: ignore[no-any-return]


def model_with(name: str, config: str, **options: Any) -> nn.Module:
    return getattr(transformers, name)(getattr(transformers, config)(**options))  # type: ignore[no-any-return]


def clip() -> nn.Module:
    text = {**_SIZES, "projection_dim": 16, "eos_token_id": 63}
    vision = {**_VISION, "projection_dim": 16}
    return model_with("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)


def whisper() -> nn.Module:
    return model_with(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **{key: value for key, value in _SEQ2SEQ.items() if key != "max_position_embeddings"},
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def both(batch: int, length: int) -> dict[str, Tensor]:
    return {**tokens(batch, length), **pixels(batch, length)}


def speech(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 8, 32), "decoder_input_ids": _tokens(batch, length)}


def waves(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 40 * length)}


GROUPED = {"num_key_value_heads": 2}
MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs, float, float]] = {
    # model, inputs, outside of embeddings the least share of parameters in tensors with units, the most that is left
    "BERT": (lambda: language_model("BertModel", num_hidden_layers=2), tokens, 0.45, 1 / 3),
    "BERT with masks": (
        lambda: model_with("BertForSequenceClassification", "BertConfig", **_SIZES),
        masked_tokens,
        0.5,
        1 / 3,
    ),
    "BERT, eager attention": (lambda: language_model("BertModel", attn_implementation="eager"), tokens, 0.45, 1 / 3),
    "DistilBERT": (
        lambda: model_with(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=64,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=48,
        ),
        tokens,
        0.3,
        1 / 3,
    ),
    "RoBERTa": (lambda: language_model("RobertaModel"), tokens, 0.45, 1 / 3),
    "ELECTRA": (lambda: language_model("ElectraModel", embedding_size=16), tokens, 0.5, 1 / 3),
    "ALBERT": (lambda: language_model("AlbertModel", embedding_size=16), tokens, 0.4, 1 / 3),
    "DeBERTa-v2": (
        lambda: language_model("DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"]),
        tokens,
        0.3,
        1 / 3,
    ),
    "ModernBERT": (
        lambda: language_model("ModernBertModel", cls_token_id=1, sep_token_id=2),
        tokens,
        0.6,
        1 / 3,
    ),
    "ViT": (lambda: model_with("ViTForImageClassification", "ViTConfig", **_VISION), pixels, 0.4, 1 / 3),
    "DeiT": (lambda: model_with("DeiTModel", "DeiTConfig", **_VISION), pixels, 0.4, 1 / 3),
    "DINOv2": (lambda: model_with("Dinov2Model", "Dinov2Config", **_VISION, mlp_ratio=2), pixels, 0.4, 1 / 3),
    "CLIP": (clip, both, 0.4, 1 / 3),
    "OPT": (
        lambda: language_model("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32),
        tokens,
        0.45,
        1 / 3,
    ),
    "T5": (
        lambda: model_with(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
        ),
        two_sequences,
        0.6,
        1 / 3,
    ),
    "BART": (lambda: model_with("BartForConditionalGeneration", "BartConfig", **_SEQ2SEQ), two_sequences, 0.5, 1 / 3),
    "Whisper": (whisper, speech, 0.5, 1 / 3),
    "Wav2Vec2": (
        lambda: language_model(
            "Wav2Vec2Model",
            conv_dim=(16, 16),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
        ),
        waves,
        0.5,
        1 / 3,
    ),
    "GPT-2": (lambda: model_with("GPT2LMHeadModel", "GPT2Config", **_GPT), tokens, 0.45, 1 / 3),
    "GPT-2 without cache": (
        lambda: model_with("GPT2LMHeadModel", "GPT2Config", **_GPT, use_cache=False),
        tokens,
        0.45,
        1 / 3,
    ),
    "GPT-J": (lambda: model_with("GPTJForCausalLM", "GPTJConfig", **_GPT, rotary_dim=4), tokens, 0.45, 1 / 3),
    "GPT-NeoX": (lambda: language_model("GPTNeoXForCausalLM"), tokens, 0.45, 1 / 3),
    "Bloom": (
        lambda: model_with("BloomForCausalLM", "BloomConfig", vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        tokens,
        0.3,
        1 / 3,
    ),
    "Llama": (lambda: language_model("LlamaForCausalLM"), tokens, 0.5, 1 / 3),
    "Llama, grouped queries": (
        lambda: language_model("LlamaForCausalLM", **GROUPED, num_hidden_layers=2),
        tokens,
        0.5,
        1 / 3,
    ),
    "Llama, eager attention": (
        lambda: language_model("LlamaForCausalLM", **GROUPED, attn_implementation="eager"),
        tokens,
        0.5,
        1 / 3,
    ),
    "Qwen2": (lambda: language_model("Qwen2ForCausalLM", **GROUPED), tokens, 0.5, 1 / 3),
    "Qwen3": (lambda: language_model("Qwen3ForCausalLM", **GROUPED, head_dim=8), tokens, 0.5, 1 / 3),
    "Mistral": (lambda: language_model("MistralForCausalLM", **GROUPED), tokens, 0.5, 1 / 3),
    "Mixtral": (
        lambda: language_model("MixtralForCausalLM", **GROUPED, num_local_experts=3, experts_implementation="eager"),
        tokens,
        0.5,
        1 / 3,
    ),
    "Gemma 2": (lambda: language_model("Gemma2ForCausalLM", **GROUPED, head_dim=8), tokens, 0.5, 1 / 3),
    "Phi": (lambda: language_model("PhiForCausalLM"), tokens, 0.45, 1 / 3),
    "Phi-3": (lambda: language_model("Phi3ForCausalLM", **GROUPED), tokens, 0.5, 1 / 3),
    "Mamba": (
        lambda: model_with(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=1,
            state_size=4,
        ),
        tokens,
        0.4,
        1 / 3,
    ),
    "Swin": (
        lambda: model_with(
            "SwinModel",
            "SwinConfig",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[1, 1],
            num_heads=[4, 4],
            window_size=4,
        ),
        large_pixels,
        0.4,
        1 / 3,
    ),
    "Segformer": (
        lambda: model_with(
            "SegformerModel",
            "SegformerConfig",
            hidden_sizes=[16, 16],
            depths=[1, 1],
            num_attention_heads=[4, 4],
            sr_ratios=[2, 1],
            num_encoder_blocks=2,
            patch_sizes=[7, 3],
            strides=[4, 2],
            mlp_ratios=[2, 2],
        ),
        large_pixels,
        0.3,
        1 / 3,
    ),
    "ConvNeXt": (
        lambda: model_with("ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
        large_pixels,
        0.2,
        0.7,
    ),
    "ResNet of Hugging Face": (
        lambda: model_with(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
        ),
        large_pixels,
        0.9,
        0.3,
    ),
}

"""Model folders a real vLLM can load: a tokenizer folder plus the configuration of a tiny random Qwen3."""

import json
from pathlib import Path

from tests.models import folders
from tokenizers import Tokenizer


def build(shape: str, folder: Path, *, context: int = 32768) -> Path:
    """A loadable model of one of ``tests.models.folders.SHAPES``, for ``--load-format dummy``."""
    return add_weights_config(folders.write(shape, folder), context=context)


def embedding(folder: Path, *, encoder: bool) -> Path:
    """A loadable embedding model: a BERT, or a Qwen3 that sentence-transformers pools by its last token."""
    build("chatml", folder, context=512)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if encoder:
        bert = {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu"}
        dropped = ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps")
        config = {key: value for key, value in config.items() if key not in dropped} | bert
    else:
        module = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
        (folder / "modules.json").write_text(json.dumps([module]))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    path.write_text(json.dumps(config))
    return folder


def add_weights_config(folder: Path, *, context: int = 32768) -> Path:
    """Writes ``config.json`` for the tokenizer in the folder: 2 layers, 128 hidden, ``context`` tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": tokenizer.token_to_id(str(settings["eos_token"])),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder

"""Models as plain numbers, for estimates: transformers of all kinds, and chains of other layers. No torch here.

    sizes("gpt3-175b"), sizes("llama3-8b"), sizes("resnet-50")          by name
    sizes("gpt layers=96 hidden=12288 heads=96 sequence=2048 vocabulary=51200")
    sizes("llama layers=32 hidden=4096 heads=32 kv_heads=8 ffn=14336 sequence=8192 vocabulary=128256")
    sizes("mixtral-8x7b sequence=4096")                                 a preset with other numbers
    sizes("llama/config.json")                                          a Hugging Face model (config_json.py)
    sizes("my_model.toml")                                              a table of the same keys; `kind` as above
    dataclasses.replace(MODELS["gpt3-175b"], layers=48)                 in Python; or Transformer(...), Chain(...)

Sources of the presets: GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020), Megatron-LM (Narayanan et al. 2021,
table 1), Korthikanti et al. 2022 (table 3), Llama 2 (Touvron et al. 2023), Llama 3 (Grattafiori et al. 2024), Mixtral
(Jiang et al. 2024), Qwen3 (Yang et al. 2025), DeepSeek-V3 (2024), gpt-oss (OpenAI 2025), MPT (MosaicML 2023), and
ResNet-50 (He et al. 2015).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from minipar.errors import PlanError
from minipar.models.config_json import from_config
from minipar.models.table import GPT, MLP, PRESETS, PUBLISHED, Branchy, Mixture, Preset, convolutions
from minipar.wording import did_you_mean


@dataclass(frozen=True)
class Transformer:
    """A transformer of `layers` equal blocks between an embedding and a head.

    layers, hidden, heads   blocks; numbers of a token between blocks; heads of attention
    sequence, vocabulary    tokens of a row; different tokens
    kv_heads                heads of keys and values (grouped queries); 0: as many as heads
    head_dim, value_dim     numbers of a head's queries and keys, and of its values; 0: hidden / heads, and as head_dim
    latent, query_latent    multi-head latent attention: numbers of which keys and values are made, and queries; 0: none
    rope                    the part of head_dim that is rotated, and one for all heads of the keys (latent attention)
    window, windowed        tokens that attention looks back at in a part `windowed` of the blocks; 0: at all of them
    ffn                     numbers between the matrices of the perceptron; 0: 4 x hidden
    gated                   whether the perceptron has a third matrix (SwiGLU)
    rms                     whether norms have a weight only (RMS norm), and no bias
    bias                    whether matrices have biases
    learned                 whether positions are parameters; otherwise they are rotations
    tied                    whether embedding and head share their parameters
    dropout                 whether there is dropout, which saves masks
    flash                   whether attention is one kernel that keeps no matrix of sequence x sequence
    sinks                   whether the softmax has learned sinks: kernels of attention have them from Blackwell on
    experts, top            perceptrons of a block (0: one for all tokens), and to how many of them a token goes
    shared                  numbers between the matrices of an expert that all tokens go to; 0: there is none
    dense, dense_ffn        so many first blocks have one perceptron of this size in place of experts
    capacity                places in the experts' queues, as a multiple of what tokens need
    dropless                whether there are as many places as are needed; then nothing inside an expert is kept
    expert_bias             whether experts have biases
    fused_loss              whether the loss is one kernel, which writes its gradient in place of the logits
    built                   whether minipar builds it: then embedding and head are layers as its blocks are, and layers
                            that ranks share are cut in nodes. Otherwise a stage has its blocks, as in Megatron
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    latent: int = 0
    query_latent: int = 0
    rope: int = 0
    window: int = 0
    windowed: float = 0.5
    ffn: int = 0
    gated: bool = False
    rms: bool = False
    bias: bool = True
    learned: bool = True
    tied: bool = True
    dropout: bool = True
    flash: bool = True
    sinks: bool = False
    experts: int = 0
    top: int = 1
    shared: int = 0
    dense: int = 0
    dense_ffn: int = 0
    capacity: float = 1.0
    dropless: bool = False
    expert_bias: bool = False
    fused_loss: bool = False
    built: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "sequence", "vocabulary", "top"):
            _check_whole(key, getattr(self, key), 1)
        for key in ("kv_heads", "head_dim", "value_dim", "latent", "query_latent", "rope", "window", "ffn", "experts",
                    "shared", "dense", "dense_ffn"):  # fmt: skip
            _check_whole(key, getattr(self, key), 0)
        if self.hidden % self.heads and not self.head_dim:
            raise PlanError(f"heads={self.heads}: must divide hidden={self.hidden}, or give head_dim=")
        if self.dense > self.layers or (self.dense and not self.experts):
            raise PlanError(f"dense={self.dense}: is of the first blocks of a mixture of {self.layers} blocks")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        if self.heads % self.kv_heads:
            raise PlanError(f"kv_heads={self.kv_heads}: must divide heads={self.heads}")
        if self.experts and self.top > self.experts:
            raise PlanError(f"top={self.top}: a token goes to at most experts={self.experts}")
        if not isinstance(self.capacity, (int, float)) or not 0 < self.capacity < math.inf:
            raise PlanError(f"capacity={self.capacity!r}: must be a number above 0")

    @cached_property
    def queries(self) -> int:
        """Numbers of a token's queries, of all heads."""
        return self.heads * self.head_dim

    @cached_property
    def keys(self) -> int:
        """Numbers of a token's keys; with latents, of those that are made of them."""
        return self.head_dim * (self.heads if self.latent else self.kv_heads)

    @cached_property
    def values(self) -> int:
        """Numbers of a token's values, as `keys`."""
        return self.value_dim * (self.heads if self.latent else self.kv_heads)

    @cached_property
    def mixed(self) -> int:
        """Numbers of a token that the attention core hands on."""
        return self.heads * self.value_dim

    @cached_property
    def attention_matrices(self) -> tuple[tuple[int, int, bool], ...]:
        """The matrices of one block's attention: inputs, outputs, and whether ranks that share layers cut it."""
        h, last = self.hidden, (self.mixed, self.hidden, True)
        if not self.latent:
            return (h, self.queries + self.keys + self.values, True), last
        asked = self.query_latent
        made = ((h, asked, False), (asked, self.queries, True)) if asked else ((h, self.queries, True),)
        apart = self.keys - self.heads * self.rope  # (the rotated part of the keys is one for all heads)
        return *made, (h, self.latent + self.rope, False), (self.latent, apart + self.values, True), last

    @cached_property
    def products(self) -> tuple[tuple[int, int, bool, bool], ...]:
        """The matrix products of one block one after another, those of experts left out: inputs, outputs, and which of
        the two ranks that share layers cut."""
        h, f = self.hidden, self.ffn
        parts = ((h, width, True) for width in (self.queries, self.keys, self.values))
        before = [(a, b, False, cut) for a, b, cut in (self.attention_matrices[:-1] if self.latent else parts)]
        inner = () if self.experts else (*((h, f, False, True),) * (1 + self.gated), (f, h, True, False))
        return (*before, (self.mixed, h, True, False), *inner)

    def perceptron(self, inner: int, bias: bool) -> int:
        """Parameters of a perceptron with so many numbers between its matrices."""
        firsts = 2 if self.gated else 1
        return (firsts + 1) * self.hidden * inner + bias * (firsts * inner + self.hidden)

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one block; 0 if there are none."""
        return self.experts * self.perceptron(self.ffn, self.expert_bias)

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of one block, with those of its experts."""
        if not self.experts:
            return self._with(self.perceptron(self.ffn, self.bias))
        return self._with(self.hidden * self.experts + self.expert_parameters + self.perceptron(self.shared, False))

    def _with(self, perceptrons: int) -> int:
        """Parameters of a block that has so many in its perceptrons."""
        attention = sum(a * b + self.bias * b for a, b, _ in self.attention_matrices)
        return 2 * (1 if self.rms else 2) * self.hidden + attention + perceptrons

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        h, dense = self.hidden, self._with(self.perceptron(self.dense_ffn, self.bias))
        blocks = (self.layers - self.dense) * self.block_parameters + self.dense * dense
        tokens = (1 if self.tied else 2) * self.vocabulary * h
        return blocks + tokens + self.learned * self.sequence * h + (1 if self.rms else 2) * h

    @cached_property
    def block_flops(self) -> float:
        """Operations of one block's forward for one row. Attention counts every pair of tokens, as the papers do."""
        matrices = sum(a * b for a, b, _ in self.attention_matrices)
        firsts = 3 if self.gated else 2
        inner: float = firsts * self.hidden * self.ffn
        if self.experts:
            inner = self.hidden * (self.experts + firsts * self.shared) + self.top * self.capacity * inner
        return 2.0 * self.sequence * (matrices + inner) + self.core_flops

    @cached_property
    def pairs(self) -> float:
        """Pairs of tokens of a row that attention looks at, as a part of sequence x sequence: 1, or less if some blocks
        look at a window."""
        seen = min(1.0, 2 * self.window / self.sequence) if self.window else 1.0
        return 1 - self.windowed * (1 - seen)

    @cached_property
    def core_flops(self) -> float:
        """Operations of one attention core's forward for one row."""
        return 2.0 * self.sequence**2 * (self.queries + self.mixed) * self.pairs

    @cached_property
    def head_flops(self) -> float:
        """Operations of the logits' forward for one row."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    @cached_property
    def flops(self) -> float:
        """Operations of a training step for one row, without recomputation: a backward is two forwards."""
        return 3 * (self.layers * self.block_flops + self.head_flops)


@dataclass(frozen=True)
class ChainLayer:
    """One layer of a chain. All but `parameters` are of one row.

    flops        operations of its matrix products and convolutions, forward
    size         the smallest dimension of its matrix product for many rows, which decides how efficient it is
    moved        numbers that its forward reads and writes in memory
    output       numbers that it hands on
    saved        numbers that it keeps for its backward, its input included (but for the input of the model)
    """

    flops: float
    parameters: int
    output: float
    saved: float
    moved: float
    size: float = 1e9


@dataclass(frozen=True)
class Chain:
    """Any model as layers one after another."""

    chain: tuple[ChainLayer, ...]
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chain", tuple(self.chain))
        if not self.chain:
            raise PlanError(f"model {self.name or 'Chain'}: has no layers")

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.chain)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(layer.parameters for layer in self.chain)

    @cached_property
    def flops(self) -> float:
        """Operations of a training step for one row, without recomputation."""
        return 3 * sum(layer.flops for layer in self.chain)


Sizes = Transformer | Chain


def ends_are_layers(model: Sizes) -> bool:
    """Whether embedding and head count as the blocks do, where layers are divided evenly or run again."""
    return isinstance(model, Chain) or model.built


_MOST = {"layers": 100_000, "heads": 100_000, "kv_heads": 100_000, "experts": 100_000}


def _check_whole(key: str, value: object, least: int) -> None:
    most = _MOST.get(key, 10**12)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise PlanError(f"{key}={value!r}: must be a whole number from {least} to {most}")


def of_preset(numbers: Preset, name: str = "") -> Sizes:
    """The same model as minipar builds from these numbers."""
    n = numbers
    named: dict[str, Any] = {"built": name in PRESETS, "name": name}
    if isinstance(n, GPT):
        return Transformer(
            n.layers, n.width, n.heads, n.context, n.vocab, tied=n.tied, dropout=bool(n.dropout), **named
        )
    if isinstance(n, Mixture):
        return Transformer(
            n.layers, n.width, n.heads, n.context, n.vocab, tied=False, dropout=False, experts=n.experts, top=n.top,
            capacity=n.places / (n.context * n.top), dropless=n.capacity is None, **named,
        )  # fmt: skip
    return _chain(name, n)


def llama(layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, **more: Any) -> Transformer:
    """A transformer with SwiGLU, RMS norm, rotary positions, and no biases. `more`: other fields of Transformer."""
    kind: dict[str, Any] = {"gated": True, "rms": True, "bias": False, "learned": False, "tied": False,
                            "dropout": False}  # fmt: skip
    return Transformer(layers, hidden, heads, sequence, vocabulary, **{**kind, **more})


def resnet(blocks: tuple[int, ...], name: str = "", image: int = 224, classes: int = 1000) -> Chain:
    """A residual network of bottleneck blocks, for images of image x image pixels. A layer of the chain is a block.

    Each convolution has a normalization, and all but the last of a block a ReLU. They save their inputs.
    """
    side = image // 4

    def convolution(given: int, out: int, kernel: int, pixels: int) -> tuple[float, int, float]:
        """Operations, parameters with those of the norm, and numbers that it and its norm write."""
        return 2.0 * pixels * given * out * kernel**2, given * out * kernel**2 + 2 * out, 2.0 * pixels * out

    def layer(parts: list[tuple[float, int, float]], output: float, inputs: float, size: int) -> ChainLayer:
        written = sum(part[2] for part in parts)
        return ChainLayer(
            sum(part[0] for part in parts), sum(part[1] for part in parts), output, inputs + written,
            3 * written + inputs, size,
        )  # fmt: skip

    stem = (image // 2) ** 2
    found = [layer([convolution(3, 64, 7, stem)], 64.0 * side**2, 3.0 * image**2, 64)]
    given = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for k in range(count):
            stride = 2 if stage and not k else 1
            inputs = float(given * side**2)
            before = side
            side //= stride
            parts = [
                convolution(given, width, 1, before**2),
                convolution(width, width, 3, side**2),
                convolution(width, 4 * width, 1, side**2),
            ]
            if not k:
                parts.append(convolution(given, 4 * width, 1, side**2))
            given = 4 * width
            found.append(layer(parts, float(given * side**2), inputs, width))
    head = ChainLayer(2.0 * given * classes, given * classes + classes, classes, given + classes, given + classes)
    return Chain((*found, head), name)


# A table of models that have no builder here, beside those of `minipar.models.table`.
MODELS: dict[str, Sizes] = {
    **{name: of_preset(numbers, name) for name, numbers in PUBLISHED.items()},
    **{
        name: llama(*numbers, kv_heads=kv, ffn=ffn, name=name)
        for name, kv, ffn, *numbers in (
            ("llama2-7b", 32, 11008, 32, 4096, 32, 4096, 32000),
            ("llama2-13b", 40, 13824, 40, 5120, 40, 4096, 32000),
            ("llama2-70b", 8, 28672, 80, 8192, 64, 4096, 32000),
            ("llama3-8b", 8, 14336, 32, 4096, 32, 8192, 128256),
            ("llama3-70b", 8, 28672, 80, 8192, 64, 8192, 128256),
            ("llama3-405b", 8, 53248, 126, 16384, 128, 8192, 128256),
            ("llama3.1-8b", 8, 14336, 32, 4096, 32, 131072, 128256),
            ("llama3.1-70b", 8, 28672, 80, 8192, 64, 131072, 128256),
            ("llama3.1-405b", 8, 53248, 126, 16384, 128, 131072, 128256),
        )
    },
    "mixtral-8x7b": llama(32, 4096, 32, 8192, 32000, kv_heads=8, ffn=14336, experts=8, top=2, name="mixtral-8x7b"),
    "mixtral-8x22b": llama(56, 6144, 48, 8192, 32768, kv_heads=8, ffn=16384, experts=8, top=2, name="mixtral-8x22b"),
    **{
        name: llama(
            layers, hidden, heads, 4096, 151936, kv_heads=4, head_dim=128, ffn=ffn, experts=128, top=8, name=name
        )
        for name, layers, hidden, heads, ffn in (
            ("qwen3-30b-a3b", 48, 2048, 32, 768),
            ("qwen3-235b-a22b", 94, 4096, 64, 1536),
        )
    },
    "deepseek-v3": llama(
        61,
        7168,
        128,
        4096,
        129280,
        head_dim=192,
        value_dim=128,
        latent=512,
        query_latent=1536,
        rope=64,
        ffn=2048,
        experts=256,
        top=8,
        shared=2048,
        dense=3,
        dense_ffn=18432,
        name="deepseek-v3",
    ),
    "gpt-oss-120b": llama(
        36,
        2880,
        64,
        4096,
        201088,
        kv_heads=8,
        head_dim=64,
        window=128,
        sinks=True,
        ffn=2880,
        experts=128,
        top=4,
        bias=True,
        expert_bias=True,
        name="gpt-oss-120b",
    ),
    **{
        name: Transformer(
            layers, hidden, heads, 2048, 50368, bias=False, learned=False, dropout=False, fused_loss=True, name=name
        )
        for name, layers, hidden, heads in (
            ("mpt-125m", 12, 768, 12),
            ("mpt-350m", 24, 1024, 16),
            ("mpt-760m", 24, 1536, 12),
            ("mpt-1b", 24, 2048, 16),
            ("mpt-3b", 32, 2560, 20),
            ("mpt-7b", 32, 4096, 32),
            ("mpt-13b", 40, 5120, 40),
            ("mpt-30b", 48, 7168, 56),
            ("mpt-70b", 80, 8192, 64),
        )
    },
    "resnet-50": resnet((3, 4, 6, 3), "resnet-50"),
}
KINDS = ("gpt", "llama", "mixture")
_NUMBERS = "numbers, such as 'gpt layers=24 hidden=1024 heads=16 sequence=1024 vocabulary=50257' (or llama, mixture)"


def names() -> tuple[str, ...]:
    """The names that `sizes` knows: published models, then those that can be built."""
    return (*MODELS, *(name for name in PRESETS))


def sizes(given: str | Path | Sizes | Preset | Mapping[str, Any]) -> Sizes:
    """The numbers of a model, from its name, words, a TOML file, or a table of the words; or as they are.

    Errors: PlanError for an unknown name or number, which lists the known ones.
    """
    if isinstance(given, (Transformer, Chain)):
        return given
    if isinstance(given, (GPT, Mixture, MLP, Branchy)):
        return of_preset(given)
    if isinstance(given, Mapping):
        table = dict(given)
        return _worded(str(table.pop("kind", "gpt")), table, "model")
    if isinstance(given, Path):
        if given.suffix not in (".toml", ".json"):
            raise PlanError(
                f"model {str(given)!r}: a file with a model's numbers is a .toml or a config.json; or give {_NUMBERS}"
            )
        return _of_file(str(given), {})
    if not isinstance(given, str):
        raise PlanError(
            f"model {type(given).__name__}: must be a name, words, a table or a dataclass; for a torch model give "
            "models.counting.chain_of(model, example), or estimate(..., example=) an example of its input"
        )
    name, *words = given.split() or [""]
    if not name:
        raise PlanError(f"model '': none is named; there are {', '.join(names())}; or give {_NUMBERS}")
    table = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise PlanError(f"model word {word!r}: must be key=value, such as layers=24")
        table[key] = value
    if name.endswith((".toml", ".json")):
        return _of_file(name, table)
    return _worded(name, table, str(given))


def _of_file(path: str, table: dict[str, Any]) -> Sizes:
    """A model from a TOML file or a config.json, with the numbers of a table in place of the file's."""
    if path.endswith(".json"):
        return Transformer(**from_config(path, {key: _number(key, value) for key, value in table.items()}))
    read = read_toml(path)
    read = dict(read.get("model", read))
    return _worded(str(read.pop("kind", read.pop("like", "gpt"))), {**read, **table}, path)


def _worded(name: str, table: dict[str, Any], words: str) -> Sizes:
    """A model of a kind, or a preset, with the numbers of a table."""
    if name in KINDS:
        given = {key: _number(key, value) for key, value in table.items()}
        missing = [key for key in ("layers", "hidden", "heads", "sequence", "vocabulary") if key not in given]
        if missing:
            raise PlanError(f"model {words!r}: {', '.join(missing)} missing, such as {missing[0]}=1024")
        if name == "mixture":
            given = {"experts": 8, "top": 2, **given}
        given.setdefault("name", name)
        return llama(**given) if name != "gpt" else Transformer(**given)
    if name in MODELS:
        model = MODELS[name]
    elif name in PRESETS:
        model = of_preset(PRESETS[name], name)
    else:
        raise PlanError(
            f"model {name!r}: no such preset; there are {', '.join(names())}; or give {_NUMBERS}"
            f"{did_you_mean(name, names())}"
        )
    if not table:
        return model
    if isinstance(model, Chain):
        raise PlanError(f"model {words!r}: {name} is a chain of layers, and has no numbers to change")
    changed = {key: _number(key, value) for key, value in table.items()}
    if {"hidden", "heads"} & {*changed} and not model.latent:  # (a head's numbers follow from them)
        changed = {"head_dim": 0, "value_dim": 0, **changed}
    return replace(model, **changed)


def _number(key: str, value: Any) -> Any:
    """The value of a field of Transformer, from a word."""
    known = {field.name: field.type for field in fields(Transformer)}
    if key not in known:
        raise PlanError(f"model {key}={value}: no such number; possible are {', '.join(known)}")
    kind = str(known[key])
    if kind == "str" or not isinstance(value, str):
        return value
    if kind == "bool":
        truth = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if value.lower() not in truth:
            raise PlanError(f"model {key}={value}: must be true or false")
        return truth[value.lower()]
    try:
        return int(value) if kind == "int" else float(value)
    except ValueError:
        raise PlanError(f"model {key}={value}: must be a number") from None


def _chain(name: str, model: MLP | Branchy) -> Chain:
    """A preset of another kind as a chain. Its bytes and operations are those of its layers.

    A layer of an MLP keeps what is between its Linear and its GELU; the last one has no GELU, but the loss keeps
    probabilities. In a model with branches a ReLU keeps only its output, the pooling layer keeps the mean that is its
    convolution's input, and the head the mean over the image.
    """
    found: list[ChainLayer] = []
    if isinstance(model, MLP):
        for a, b in pairwise(model.widths):
            found.append(ChainLayer(2.0 * a * b, a * b + b, b, (a if found else 0) + b, a + 3 * b, min(a, b)))
        return Chain(tuple(found), name)
    table = convolutions(model)
    for l, (given, out, side) in enumerate(table):
        head = l == len(table) - 1
        pixels = 1 if head else model.inputs
        size = (out or given) * pixels
        own = given + size if head else given * model.inputs if l % 7 == 6 else 0
        before = found[-1].output if found else 0
        flops, held = 2.0 * pixels * given * out * side**2, given * out * side**2 + out
        moved, least = 3 * size + given * pixels, max(1, min(given, out or given))
        found.append(ChainLayer(flops, held, size, before + own, moved, least))
    return Chain(tuple(found), name)


def read_toml(path: str) -> dict[str, Any]:
    """The table in a TOML file. Errors: PlanError for a file that cannot be read."""
    try:
        import tomllib
    except ModuleNotFoundError:
        raise PlanError(
            f"{path}: reading TOML needs Python 3.11; possible are words, such as a preset's name"
        ) from None
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise PlanError(
            f"{path}: {error.strerror}; possible are a file's path, or words such as a preset's name"
        ) from None
    except ValueError as error:
        raise PlanError(f"{path}: is no TOML: {error}; possible are lines such as layers = 24") from None

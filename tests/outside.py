"""Models as other people write them, each with its own data and loss: what walks into `train` as it is.

    python -m tests.outside            every model under every plan, compared with plain torch, and the table of
                                       docs/own_model.md written anew (some minutes)
    python -m tests.outside unet gcn   these alone, and errors whole

The models of transformers are its own, small and with random values. All others are written anew after a paper or a
well-known small repository, with the habits that are found there. A row of the table is equal if losses, gradients and
parameters of two steps of SGD are those of a plain loop over the unmodified model, to 1e-10 in float64. Dropout has the
probability 0, and norms that take statistics of a batch are in eval mode. Where a model samples, each part of a batch
draws numbers of its own: the plain loop seeds torch's generator before it as `draw_seed` says.
"""

from __future__ import annotations

import math
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minipar
from minipar import PlanError
from minipar.models.randomness import draw_seed
from minipar.program.rows import split_rows
from tests.plain_loop import BOUND, assert_equals_plain_torch

ROWS, WORDS, TOKENS, WIDTH, CLASSES = 7, 13, 6, 8, 4


class Entry(NamedTuple):
    """A model that somebody has: how it is made, what it is given (rows first), and its loss.

    narrow    it computes parts in float32, whatever the type of its parameters
    drawing   the layer that draws random numbers; None: nothing does
    """

    family: str
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    narrow: bool = False
    drawing: int | None = None


ENTRIES: dict[str, Entry] = {}


def outside(name: str, family: str, data: Any, loss: Any = None, **more: Any) -> Callable[[Any], Any]:
    """Note a model under a name; `data` is a function that makes x and y, and with them a loss of its own."""

    def note(make: Any) -> Any:
        ENTRIES[name] = Entry(family, make, data, cross_entropy if loss is None else loss, **more)
        return make

    return note


# data and losses ------------------------------------------------------------------------------------------------------


def first(output: Any) -> Tensor:
    """The logits of an output, or its first tensor."""
    while not isinstance(output, Tensor):
        if isinstance(output, dict):
            output = output["logits"] if "logits" in output else next(iter(output.values()))
        else:
            output = output.logits if hasattr(output, "logits") else output[0]
    return output


def cross_entropy(output: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(first(output).flatten(0, -2), y.flatten())


def squares(output: Any, y: Tensor) -> Tensor:
    return F.mse_loss(first(output), y)


def floats(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape)


def ints(count: int, *shape: int) -> Tensor:
    return torch.randint(count, (ROWS, *shape))


def ids() -> Tensor:
    return ints(WORDS, TOKENS)


def labels() -> Tensor:
    return torch.arange(ROWS) % CLASSES


def words() -> tuple[Tensor, Tensor]:
    return ids(), ids()


def texts() -> tuple[Tensor, Tensor]:
    return ids(), labels()


def vectors(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(ROWS, *shape), labels())


def pairs(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Numbers, and numbers of the same shape that are wanted."""
    return lambda: (torch.randn(ROWS, *shape), torch.randn(ROWS, *shape))


pictures, series = vectors(3, 8, 8), vectors(WIDTH, TOKENS)


def perceptron(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


# language -------------------------------------------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.register_buffer("bias", torch.tril(torch.ones(TOKENS, TOKENS)).view(1, 1, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalSelfAttention(), nn.LayerNorm(WIDTH)
        self.mlp = perceptron(WIDTH, 2 * WIDTH, WIDTH, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@outside("nanogpt", "GPT", words)
class NanoGPT(nn.Module):
    """karpathy/nanoGPT: an assertion, tied weights, and (logits, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(WORDS, WIDTH), "wpe": nn.Embedding(TOKENS, WIDTH), "drop": nn.Dropout(0.0),
            "h": nn.ModuleList([GPTBlock() for _ in range(3)]), "ln_f": nn.LayerNorm(WIDTH),
        })  # fmt: skip
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= TOKENS, f"Cannot forward sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


@outside("lstm_tagger", "recurrent", lambda: ({"ids": ids(), "lengths": 2 + torch.arange(ROWS) % 5}, ids()))
class Tagger(nn.Module):
    """Sentences of unequal lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.hidden2tag = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths.cpu(), True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids.size(1))
        return F.log_softmax(self.hidden2tag(out), dim=-1)


@outside("fasttext", "text", texts)
class FastText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.EmbeddingBag(WORDS, WIDTH, mode="mean"), nn.Linear(WIDTH, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        return self.fc(self.embedding(text))


@outside("treelstm", "recursive", lambda: ((ids(), torch.arange(ROWS) % 3), labels()))
class TreeNet(nn.Module):
    """Socher et al., 2013: words are composed along a tree, another one in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.compose = nn.Embedding(WORDS, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def build(self, words: Tensor, shape: int) -> Tensor:
        if len(words) == 1:
            return words[0]
        at = (1, len(words) // 2, len(words) - 1)[shape]
        left, right = self.build(words[:at], shape), self.build(words[at:], shape)
        return torch.tanh(self.compose(torch.cat([left, right])))

    def forward(self, words: Tensor, shapes: Tensor) -> Tensor:
        pairs = zip(self.embed(words), shapes, strict=True)
        return self.out(torch.stack([self.build(row, int(shape)) for row, shape in pairs]))


class Attend(nn.Module):
    """Bahdanau et al., 2015."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.energy = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, state: Tensor, seen: Tensor) -> Tensor:
        weights = F.softmax(self.energy(torch.tanh(self.query(state).unsqueeze(1) + self.key(seen))), 1)
        return (weights * seen).sum(1)


@outside("seq2seq", "translation", lambda: ({"source": ids(), "target": ids()}, ids()))
class Seq2Seq(nn.Module):
    """A GRU reads, a cell with attention writes; parts are called by methods of their own names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell, self.attention, self.out = nn.GRUCell(2 * WIDTH, WIDTH), Attend(), nn.Linear(2 * WIDTH, WORDS)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        seen, last = self.encoder(self.embed(source))
        return seen, last.squeeze(0)

    def step(self, word: Tensor, state: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        context = self.attention(state, seen)
        state = self.cell(torch.cat([self.embed(word), context], -1), state)
        return self.out(torch.cat([state, context], -1)), state

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen, state = self.encode(source)
        outputs = torch.zeros(*target.shape, WORDS, dtype=seen.dtype)
        for t in range(target.size(1)):
            outputs[:, t], state = self.step(target[:, t], state, seen)
        return outputs


class SubLayer(nn.Module):
    """Of the Annotated Transformer: a norm before, a residual around any function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class DecoderLayer(nn.Module):
    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.src_attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True) if crosses else None
        self.feed_forward = perceptron(WIDTH, 2 * WIDTH, WIDTH)
        self.sublayer = nn.ModuleList([SubLayer() for _ in range(3)])

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, attn_mask=mask, need_weights=False)[0])
        if self.src_attn is not None:
            x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory)[0])
        return self.sublayer[2](x, self.feed_forward)


class Stack(nn.Module):
    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([DecoderLayer(crosses) for _ in range(2)]), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return self.norm(x)


@outside("annotated", "translation", lambda: ((ids(), ids()), ids()))
class EncoderDecoder(nn.Module):
    """harvardnlp/annotated-transformer: `encode` and `decode`, and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(False), Stack(True)
        self.src_embed, self.tgt_embed = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.generator = nn.Linear(WIDTH, WORDS)

    def encode(self, src: Tensor) -> Tensor:
        return self.encoder(self.src_embed(src) * math.sqrt(WIDTH))

    def decode(self, memory: Tensor, tgt: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(tgt.size(-1), tgt.size(-1)), diagonal=1).bool()
        return self.decoder(self.tgt_embed(tgt) * math.sqrt(WIDTH), memory, mask)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return F.log_softmax(self.generator(self.decode(self.encode(src), tgt)), -1)


@outside("nn_transformer", "translation", lambda: ({"src": ids(), "tgt": ids()}, ids()))
class Translator(nn.Module):
    """PyTorch's tutorial of translation: nn.Transformer with padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, 0.0, batch_first=True)
        self.src, self.tgt = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.generator = nn.Linear(WIDTH, WORDS)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=self.src.weight.dtype)
        padding = torch.zeros_like(src, dtype=self.src.weight.dtype).masked_fill(src == 1, -1e9)
        out = self.transformer(self.src(src), self.tgt(tgt), tgt_mask=mask, src_key_padding_mask=padding)
        return self.generator(out)


@outside("transformer_xl", "memory", lambda: (ints(WORDS, 9), ints(WORDS, 9)))
class TransformerXL(nn.Module):
    """Dai et al., 2019: segments one after another; each layer sees what it was given in the segment before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([DecoderLayer(True) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        found, mems = [], None
        for segment in ids.split(3, 1):
            h, seen = self.embed(segment), []
            for k, layer in enumerate(self.layers):
                seen.append(h.detach())
                h = layer(h, h if mems is None else torch.cat([mems[k], h], 1))
            found.append(self.head(h))
            mems = seen
        return torch.cat(found, 1)


@outside("albert_like", "shared depth", words)
class Universal(nn.Module):
    """Dehghani et al., 2019; ALBERT: one block, again and again, with the number of the pass added."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(WORDS, WIDTH), GPTBlock(), nn.Linear(WIDTH, WORDS)
        self.passes = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for step in range(4):
            x = self.block(x + self.passes[step])
        return self.head(x)


class RotaryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (w(x).view(*x.shape[:2], 2, -1) for w in (self.wq, self.wk, self.wv))
        turned = (torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) * freqs_cis for t in (q, k))
        q, k = (torch.view_as_real(t).flatten(3).type_as(x).transpose(1, 2) for t in turned)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))
        scores = F.softmax((scores if mask is None else scores + mask).float(), dim=-1).type_as(x)
        return self.wo((scores @ v.transpose(1, 2)).transpose(1, 2).contiguous().view(*x.shape[:2], -1))


@outside("meta_llama", "GPT", words, narrow=True)
class MetaLlama(nn.Module):
    """meta-llama/llama: a table of complex numbers that is no buffer, and that its forward moves and keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList()
        for _ in range(2):
            self.layers.append(RotaryAttention())
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        angles = torch.outer(torch.arange(2.0 * TOKENS), 1.0 / 10000.0 ** torch.tensor([0.0, 0.5]))
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        h, seqlen = self.tok_embeddings(tokens), tokens.shape[1]
        self.freqs_cis = self.freqs_cis.to(h.device)
        freqs_cis, mask = self.freqs_cis[start_pos : start_pos + seqlen, None], None
        if seqlen > 1:
            mask = torch.triu(torch.full((seqlen, seqlen), float("-inf")), diagonal=1).type_as(h)
        for layer in self.layers:
            h = h + layer(h, freqs_cis, mask)
        return self.output(h).float()


@outside("ponder", "adaptive", words)
class Ponder(nn.Module):
    """Graves, 2016: each token takes as many passes as it needs; the forward asks for the values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.halt = nn.Embedding(WORDS, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        state, left = torch.zeros_like(x), torch.ones_like(x[:, :1])
        found = torch.zeros_like(x)
        while (left > 0.2).any():
            state = self.cell(x, state)
            p = torch.sigmoid(self.halt(state)) * left
            found, left = found + p * state, left - p - 0.05
        return self.head(found).view(*ids.shape, WORDS)


@outside("moe", "mixture of experts", words)
class SparseMoE(nn.Module):
    """AviSoori1x/makeMoE and Mixtral: the two best experts of each token, found by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.gates = nn.ModuleList([nn.Linear(WIDTH, 4) for _ in range(2)])
        self.experts = nn.ModuleList(nn.ModuleList(perceptron(WIDTH, 12, WIDTH) for _ in "1234") for _ in "12")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights, chosen = gate(x).topk(2, dim=-1)
            weights, out = F.softmax(weights, dim=-1), torch.zeros_like(x)
            for i, expert in enumerate(experts):
                mask = (chosen == i).any(dim=-1)
                if mask.any():
                    share = (weights * (chosen == i)).sum(-1)[mask]
                    out[mask] += share.unsqueeze(-1) * expert(x[mask])
            x = x + out
        return self.head(x)


# pictures -------------------------------------------------------------------------------------------------------------


def conv_bn(a: int, b: int, k: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
    )


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, a: int, b: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.relu, self.downsample = nn.ReLU(inplace=True), downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


@outside("resnet", "residual", pictures)
class ResNet(nn.Module):
    """torchvision's, of a sixteenth of its width."""

    def __init__(self) -> None:
        super().__init__()
        self.inplanes = 4
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = self._make_layer(4, 2), self._make_layer(8, 2, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, CLASSES)

    def _make_layer(self, planes: int, blocks: int, stride: int = 1) -> nn.Sequential:
        down = None
        if stride != 1 or self.inplanes != planes:
            down = nn.Sequential(nn.Conv2d(self.inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))
        layers = [BasicBlock(self.inplanes, planes, stride, down)]
        self.inplanes = planes
        return nn.Sequential(*layers, *[BasicBlock(planes, planes) for _ in range(1, blocks)])

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


@outside("unet", "U-Net", lambda: (floats(3, 8, 8), ints(CLASSES, 8, 8)), F.cross_entropy)
class UNet(nn.Module):
    """milesial/Pytorch-UNet: named stages, skips with padding to the size of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = self.double(3, 4), self.double(4, 8), self.double(8, 16)
        self.up1, self.conv1 = nn.ConvTranspose2d(16, 8, 2, 2), self.double(16, 8)
        self.up2, self.conv2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), self.double(12, 4)
        self.pool, self.outc = nn.MaxPool2d(2), nn.Conv2d(4, CLASSES, 1)

    @staticmethod
    def double(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(conv_bn(a, b), conv_bn(b, b))

    def up(self, up: nn.Module, conv: nn.Module, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = up(x1)
        dy, dx = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return conv(torch.cat([x2, x1], dim=1))

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(self.pool(x1))
        x3 = self.down2(self.pool(x2))
        return self.outc(self.up(self.up2, self.conv2, self.up(self.up1, self.conv1, x3, x2), x1))


class DenseLayer(nn.Module):
    def __init__(self, a: int, growth: int, drop_rate: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.relu1, self.conv1 = nn.BatchNorm2d(a), nn.ReLU(inplace=True), nn.Conv2d(a, 2 * growth, 1)
        self.norm2, self.relu2 = nn.BatchNorm2d(2 * growth), nn.ReLU(inplace=True)
        self.conv2, self.drop_rate = nn.Conv2d(2 * growth, growth, 3, 1, 1, bias=False), drop_rate

    def forward(self, inputs: list[Tensor]) -> Tensor:
        narrow = self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))
        new = self.conv2(self.relu2(self.norm2(narrow)))
        return F.dropout(new, p=self.drop_rate, training=self.training) if self.drop_rate > 0 else new


class DenseBlock(nn.ModuleDict):
    """Each layer is given the outputs of all before it."""

    def __init__(self, layers: int, a: int, growth: int) -> None:
        super().__init__()
        for i in range(layers):
            self.add_module(f"denselayer{i + 1}", DenseLayer(a + i * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


@outside("densenet", "densely connected", vectors(3, 32, 32))
class DenseNet(nn.Module):
    """Huang et al., 2017, as torchvision has it: the 121 layers of the paper, two channels new in each."""

    def __init__(self, blocks: tuple[int, ...] = (6, 12, 24, 16), growth: int = 2, width: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, width, 7, 2, 3, bias=False))
        self.features.add_module("norm0", nn.BatchNorm2d(width))
        self.features.add_module("relu0", nn.ReLU(inplace=True))
        self.features.add_module("pool0", nn.MaxPool2d(3, 2, 1))
        for i, layers in enumerate(blocks):
            self.features.add_module(f"denseblock{i + 1}", DenseBlock(layers, width, growth))
            width += layers * growth
            if i + 1 < len(blocks):
                narrow = [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width // 2, 1, bias=False)]
                self.features.add_module(f"transition{i + 1}", nn.Sequential(*narrow, nn.AvgPool2d(2, 2)))
                width //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(width))
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.features(x), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1))


class EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, input: Tensor) -> Tensor:
        torch._assert(input.dim() == 3, f"Expected (rows, tokens, width), got {input.shape}")
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x) + input
        return x + self.mlp(self.ln_2(x))


@outside("vision_transformer", "vision transformer", pictures)
class VisionTransformer(nn.Module):
    """Dosovitskiy et al., 2021, as torchvision has it: a class token, positions, and a perceptron of five parts."""

    def __init__(self, patch: int = 4) -> None:
        super().__init__()
        self.conv_proj, self.patch = nn.Conv2d(3, WIDTH, patch, patch), patch
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embedding = nn.Parameter(torch.randn(1, (8 // patch) ** 2 + 1, WIDTH) * 0.02)
        self.dropout, self.layers = nn.Dropout(0.1), nn.Sequential()
        for i in range(2):
            self.layers.add_module(f"encoder_layer_{i}", EncoderBlock())
        self.ln, self.heads = nn.LayerNorm(WIDTH), nn.Sequential()
        self.heads.add_module("head", nn.Linear(WIDTH, CLASSES))

    def _process_input(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        torch._assert(h == w == 8, f"Wrong size of a picture: {h} by {w}")
        return self.conv_proj(x).reshape(n, WIDTH, (h // self.patch) * (w // self.patch)).permute(0, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self._process_input(x)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.ln(self.layers(self.dropout(x + self.pos_embedding)))
        return self.heads(x[:, 0])


def shifted_window_attention(x: Tensor, qkv: nn.Linear, proj: nn.Linear, bias: Tensor, window: int, shift: int,
                             heads: int, dropout: float, training: bool) -> Tensor:  # fmt: skip
    """Attention within windows of a picture that is padded and rolled. Tokens that were no neighbours are masked."""
    rows, h, w, c = x.shape
    x = F.pad(x, (0, 0, 0, (window - w % window) % window, 0, (window - h % window) % window))
    _, high, wide, _ = x.shape
    across, down = wide // window, high // window
    if shift > 0:
        x = torch.roll(x, shifts=(-shift, -shift), dims=(1, 2))
    x = x.view(rows, down, window, across, window, c).permute(0, 1, 3, 2, 4, 5)
    x = x.reshape(rows * down * across, window * window, c)
    q, k, v = qkv(x).reshape(x.size(0), x.size(1), 3, heads, c // heads).permute(2, 0, 3, 1, 4)
    scores = (q * (c // heads) ** -0.5).matmul(k.transpose(-2, -1)) + bias
    if shift > 0:
        place = x.new_zeros((high, wide))
        parts, number = ((0, -window), (-window, -shift), (-shift, None)), 0
        for top, bottom in parts:
            for left, right in parts:
                place[top:bottom, left:right] = number
                number += 1
        place = place.view(down, window, across, window).permute(0, 2, 1, 3).reshape(down * across, window * window)
        far = place.unsqueeze(1) - place.unsqueeze(2)
        mask = far.masked_fill(far != 0, -100.0).masked_fill(far == 0, 0.0)
        scores = scores.view(rows, down * across, heads, x.size(1), x.size(1)) + mask.unsqueeze(1).unsqueeze(0)
        scores = scores.view(-1, heads, x.size(1), x.size(1))
    scores = F.dropout(F.softmax(scores, dim=-1), p=dropout, training=training)
    x = F.dropout(proj(scores.matmul(v).transpose(1, 2).reshape(x.size(0), x.size(1), c)), p=dropout, training=training)
    x = x.view(rows, down, across, window, window, c).permute(0, 1, 3, 2, 4, 5).reshape(rows, high, wide, c)
    if shift > 0:
        x = torch.roll(x, shifts=(shift, shift), dims=(1, 2))
    return x[:, :h, :w, :].contiguous()


class SwinBlock(nn.Module):
    def __init__(self, width: int, window: int, shift: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        far = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("relative_position_index", (far[..., 0] * (2 * window - 1) + far[..., 1]).flatten())
        self.window, self.shift, self.heads, self.dropout = window, shift, heads, 0.1
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.window**2
        bias = self.relative_position_bias_table[self.relative_position_index].view(tokens, tokens, -1)
        bias = bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        x = x + shifted_window_attention(
            self.norm1(x), self.qkv, self.proj, bias, self.window, self.shift, self.heads, self.dropout, self.training
        )
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * width, 2 * width, bias=False), nn.LayerNorm(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        h, w, _ = x.shape[-3:]
        x = F.pad(x, (0, 0, 0, w % 2, 0, h % 2))
        parts = [x[..., i::2, j::2, :] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Permute(nn.Module):
    def __init__(self, dims: list[int]) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return torch.permute(x, self.dims)


@outside("swin_transformer", "vision transformer", vectors(3, 12, 12))
class SwinTransformer(nn.Module):
    """Liu et al., 2021, as torchvision has it: windows are rolled and padded, the mask is made in the forward."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 2, 2), Permute([0, 2, 3, 1]), nn.LayerNorm(width)]
        first = nn.Sequential(SwinBlock(width, 4, 0), SwinBlock(width, 4, 2))
        last = nn.Sequential(SwinBlock(2 * width, 2, 0), SwinBlock(2 * width, 2, 1))
        self.features = nn.Sequential(nn.Sequential(*stem), first, PatchMerging(width), last)
        self.norm, self.permute = nn.LayerNorm(2 * width), Permute([0, 3, 1, 2])
        self.avgpool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten(1)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.permute(self.norm(self.features(x)))
        return self.head(self.flatten(self.avgpool(x)))


# graphs, points and fields --------------------------------------------------------------------------------------------


def graphs() -> tuple[Any, Tensor]:
    links = (torch.rand(ROWS, 5, 5) < 0.5).float()
    return {"x": torch.randn(ROWS, 5, WIDTH), "adj": ((links + links.mT + torch.eye(5)) > 0).float()}, labels()


class GraphConvolution(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(a, b) / a**0.5), nn.Parameter(torch.zeros(b))

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return adj @ (x @ self.weight) / adj.sum(-1, keepdim=True) + self.bias


@outside("gcn", "graph", graphs)
class GCN(nn.Module):
    """tkipf/pygcn, on a batch of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2, self.dropout = GraphConvolution(WIDTH, 6), GraphConvolution(6, CLASSES), 0.0

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj).mean(1), dim=1)


class GraphAttention(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.W, self.a = nn.Parameter(torch.randn(a, b) / a**0.5), nn.Parameter(torch.randn(2 * b, 1))
        self.leakyrelu = nn.LeakyReLU(0.2)

    def forward(self, h: Tensor, adj: Tensor) -> Tensor:
        Wh = torch.matmul(h, self.W)
        n = Wh.size(-1)
        e = self.leakyrelu(Wh @ self.a[:n, :] + (Wh @ self.a[n:, :]).mT)
        attention = F.softmax(torch.where(adj > 0, e, -9e15 * torch.ones_like(e)), dim=-1)
        return F.elu(attention @ Wh)


@outside("gat", "graph", graphs)
class GAT(nn.Module):
    """Diego999/pyGAT: heads in a plain list, which are added as modules by name."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = [GraphAttention(WIDTH, 4) for _ in range(2)]
        for i, attention in enumerate(self.attentions):
            self.add_module(f"attention_{i}", attention)
        self.out_att = GraphAttention(8, CLASSES)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = torch.cat([att(x, adj) for att in self.attentions], dim=-1)
        return F.log_softmax(F.elu(self.out_att(x, adj)).mean(1), dim=1)


@outside("message_passing", "graph", lambda: ({"x": torch.randn(ROWS, 5, WIDTH), "edges": ints(5, 2, 9)}, labels()))
class MessagePassing(nn.Module):
    """Gilmer et al., 2017: messages along edges are added up at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = perceptron(2 * WIDTH, 12, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.readout = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = (end.unsqueeze(-1).expand(-1, -1, x.size(-1)) for end in edges.unbind(1))
        for _ in range(2):
            sent = self.message(torch.cat([x.gather(1, source), x.gather(1, target)], -1))
            total = torch.zeros_like(x).scatter_add_(1, target, sent)
            x = self.update(total.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return self.readout(x.sum(1))


@outside(
    "nerf",
    "fields",
    lambda: (floats(6), torch.rand(ROWS, 4)),
    lambda out, y: F.mse_loss(torch.cat([out["rgb"], out["sigma"]], -1), y),
)
class NeRF(nn.Module):
    """yenchenlin/nerf-pytorch: points and directions in one tensor, a skip in the middle of a list."""

    def __init__(self, depth: int = 4, width: int = 12) -> None:
        super().__init__()
        self.skips = [2]
        self.pts_linears = nn.ModuleList(
            [nn.Linear(15, width)] + [nn.Linear(width + 15 * (i in self.skips), width) for i in range(depth - 1)]
        )
        self.alpha_linear, self.rgb_linear = nn.Linear(width, 1), nn.Linear(width + 3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        points, views = torch.split(x, [3, 3], dim=-1)
        points = torch.cat([points, *[fn(points * 2.0**k) for k in range(2) for fn in (torch.sin, torch.cos)]], -1)
        h = points
        for i, _ in enumerate(self.pts_linears):
            h = F.relu(self.pts_linears[i](h))
            if i in self.skips:
                h = torch.cat([points, h], -1)
        return {"rgb": self.rgb_linear(torch.cat([h, views], -1)).sigmoid(), "sigma": F.relu(self.alpha_linear(h))}


@outside(
    "schnet_forces",
    "physics",
    lambda: (floats(4, 3), floats(4, 3)),
    lambda out, y: out[0].pow(2).mean() + F.mse_loss(out[1], y),
)
class Forces(nn.Module):
    """Schütt et al., 2017: forces are the gradient of an energy, within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = perceptron(1, 8, 1, act=nn.Tanh)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        r = positions.clone().requires_grad_(True)
        apart = (r[:, :, None] - r[:, None]).pow(2).sum(-1, keepdim=True)
        energy = self.energy(apart).sum((1, 2, 3))
        (slope,) = torch.autograd.grad(energy.sum(), r, create_graph=True)
        return energy, -slope


@outside("fno", "physics", pairs(2, 8), squares)
class FNO(nn.Module):
    """Li et al., 2021: complex weights between two Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Conv1d(2, 4, 1), nn.Conv1d(4, 2, 1)
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(4, 4, 3, dtype=torch.cfloat) / 4) for _ in range(2)])
        self.w = nn.ModuleList([nn.Conv1d(4, 4, 1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.p(x)
        for weight, w in zip(self.weights, self.w, strict=True):
            x_ft = torch.fft.rfft(x)
            out_ft = torch.zeros_like(x_ft)
            out_ft[:, :, :3] = torch.einsum("bix,iox->box", x_ft[:, :, :3], weight)
            x = F.gelu(torch.fft.irfft(out_ft, n=x.size(-1)) + w(x))
        return self.q(x)


class ODEFunc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.nfe = perceptron(5, 8, 5, act=nn.Tanh), 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.nfe += 1
        return self.net(y) * (1 + t)


@outside("neural_ode", "implicit", vectors(6))
class NeuralODE(nn.Module):
    """rtqichen/torchdiffeq: midpoint steps of one function, at times that the forward keeps in the type of x."""

    def __init__(self) -> None:
        super().__init__()
        self.downsampling, self.odefunc, self.fc = nn.Linear(6, 5), ODEFunc(), nn.Linear(5, CLASSES)
        self.integration_time = torch.tensor([0.0, 0.5, 1.0])

    def forward(self, x: Tensor) -> Tensor:
        self.integration_time = self.integration_time.type_as(x)
        y = self.downsampling(x)
        for begin, end in zip(self.integration_time[:-1], self.integration_time[1:], strict=True):
            half = (end - begin) / 2
            y = y + 2 * half * self.odefunc(begin + half, y + half * self.odefunc(begin, y))
        return self.fc(y)


@outside("deq", "implicit", vectors(WIDTH))
class DEQ(nn.Module):
    """Bai et al., 2019: a fixed point is sought without gradients until it is near; one step more has them."""

    def __init__(self) -> None:
        super().__init__()
        self.inject, self.cell, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.inject(x), torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                before, z = z, torch.tanh(0.3 * self.cell(z) + x)
                if (z - before).norm() < 1e-3 * z.norm():
                    break
        return self.head(torch.tanh(0.3 * self.cell(z) + x))


# recommenders ---------------------------------------------------------------------------------------------------------

CARDINALITIES = {"user": 9, "item": 11, "city": 5}


def clicks() -> tuple[Any, Tensor]:
    sparse = {name: ints(count) for name, count in CARDINALITIES.items()}
    return {"dense": floats(3), "sparse": sparse}, (torch.arange(ROWS) % 2).float()


def click_loss(output: Any, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(first(output).flatten(), y)


@outside("dlrm", "recommender", clicks, click_loss)
class DLRM(nn.Module):
    """facebookresearch/dlrm: bags for the fields, and products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, 4, mode="sum") for n in CARDINALITIES.values()])
        self.bot_l, self.top_l = perceptron(3, 8, 4), perceptron(10, 8, 1)

    def interact(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        T = torch.cat([x, *ly], dim=1).view((x.shape[0], -1, x.shape[1]))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        li = torch.tensor([i for i in range(Z.shape[1]) for j in range(i)])
        lj = torch.tensor([j for i in range(Z.shape[1]) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense: Tensor, sparse: dict[str, Tensor]) -> Tensor:
        x = self.bot_l(dense)
        ly = [bag(ids.unsqueeze(1)) for bag, ids in zip(self.emb_l, sparse.values(), strict=True)]
        return self.top_l(self.interact(x, ly))


@outside("factorization", "recommender", lambda: ((ints(9), ints(9)), torch.randn(ROWS)), squares)
class Factorization(nn.Module):
    """Two tables and nothing else; their weights are read, not called."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.mean = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.p.weight[user] * self.q.weight[item]).sum(1) + self.mean


# speech and series ----------------------------------------------------------------------------------------------------


class ConformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff1, self.ff2 = (
            nn.Sequential(nn.LayerNorm(WIDTH), perceptron(WIDTH, 16, WIDTH, act=nn.SiLU)) for _ in "12"
        )
        self.norm, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.pointwise, self.depthwise = (
            nn.Conv1d(WIDTH, 2 * WIDTH, 1),
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
        )
        self.post_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        x = x + F.silu(self.depthwise(F.glu(self.pointwise(x.transpose(1, 2)), dim=1))).transpose(1, 2)
        return self.post_norm(x + 0.5 * self.ff2(x))


@outside("conformer", "speech", lambda: ((torch.randn(ROWS, TOKENS, 5), 2 + torch.arange(ROWS) % 5), labels()))
class Conformer(nn.Module):
    """Gulati et al., 2020: spectra and their lengths; the mean over what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList([ConformerBlock() for _ in range(2)])

    def forward(self, spectra: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.arange(spectra.size(1), device=spectra.device)[None, :] < lengths[:, None]
        x = self.project(spectra)
        for block in self.blocks:
            x = block(x) * mask.unsqueeze(-1)
        return self.head(x.sum(1) / lengths.unsqueeze(-1)), lengths


def ctc(output: Tensor, y: Tensor) -> Tensor:
    found = output.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(found, y, (len(found),) * len(y), (y.shape[1],) * len(y))


@outside("deepspeech", "speech", lambda: (floats(1, 6, 10), 1 + ints(3, 3)), ctc)
class DeepSpeech(nn.Module):
    """SeanNaren/deepspeech.pytorch: recurrent layers whose time comes first; the loss is CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Hardtanh(0, 20, inplace=True))
        self.rnns = nn.ModuleList([nn.GRU(12, 6, bidirectional=True), nn.GRU(12, 6, bidirectional=True)])
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        b, c, f, t = x.size()
        x = x.view(b, c * f, t).transpose(1, 2).transpose(0, 1).contiguous()
        for rnn in self.rnns:
            x, _ = rnn(x)
        return self.fc(x).transpose(0, 1)


@outside("tcn", "series", series)
class TCN(nn.Module):
    """locuslab/TCN: weight-normed convolutions whose ends are cut off."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.network = nn.ModuleList([norm(nn.Conv1d(WIDTH, WIDTH, 2, padding=2**i, dilation=2**i)) for i in range(3)])
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.network):
            x = F.relu(conv(x)[:, :, : -(2**i)].contiguous() + x)
        return self.linear(x[:, :, -1])


# generative -----------------------------------------------------------------------------------------------------------


@outside("tied_autoencoder", "autoencoder", pairs(10), squares)
class TiedAutoencoder(nn.Module):
    """The decoder reads the encoder's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(10, 8), nn.Linear(8, 4)])
        self.bias = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (8, 10)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        for k, layer in enumerate(reversed(self.encoder)):
            x = F.linear(x, layer.weight.t(), self.bias[k])
        return x


def elbo(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    found, mu, logvar = output
    return F.mse_loss(found, x) - 0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())


@outside("vae", "autoencoder", pairs(10), elbo, drawing=3)
class VAE(nn.Module):
    """pytorch/examples: it samples between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(10, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.fc3, self.fc4 = nn.Linear(4, 8), nn.Linear(8, 10)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 10))
        return self.fc4(F.relu(self.fc3(self.reparameterize(mu, logvar)))), mu, logvar


@outside("vqvae", "autoencoder", pairs(WIDTH), lambda out, y: out[0] + F.mse_loss(out[1], y))
class VQVAE(nn.Module):
    """zalandoresearch/pytorch-vq-vae: the nearest vectors of a table, gradients past them, and a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.embedding, self.decoder = perceptron(WIDTH, 8, 4), nn.Embedding(9, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        distances = (
            z.pow(2).sum(1, keepdim=True) + self.embedding.weight.pow(2).sum(1) - 2 * z @ self.embedding.weight.t()
        )
        indices = torch.argmin(distances, dim=1).unsqueeze(1)
        encodings = torch.zeros(len(x), 9, dtype=z.dtype, device=z.device)
        encodings.scatter_(1, indices, 1)
        quantized = encodings @ self.embedding.weight
        loss = F.mse_loss(quantized, z.detach()) + 0.25 * F.mse_loss(quantized.detach(), z)
        return loss, self.decoder(z + (quantized - z).detach())


@outside("dcgan_discriminator", "GAN", lambda: (floats(3, 8, 8), (torch.arange(ROWS) % 2).float()), click_loss)
def discriminator() -> nn.Module:
    """A chain with spectral norms, in eval mode, where these are not iterated."""
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(
        norm(nn.Conv2d(3, 4, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True), norm(nn.Conv2d(4, 8, 4, 2, 1)),
        nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 2), nn.Flatten(),
    ).eval()  # fmt: skip


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, t: Tensor) -> Tensor:
        half = self.dim // 2
        emb = torch.exp(torch.arange(half, device=t.device) * -(math.log(10000) / (half - 1)))
        emb = t[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


@outside(
    "ddpm",
    "diffusion",
    lambda: ({"x_start": floats(10), "t": torch.arange(ROWS), "noise": floats(10)}, torch.zeros(ROWS)),
    lambda out, y: out.mean(),
)
class GaussianDiffusion(nn.Module):
    """A schedule in buffers, of which each row takes its own; the forward gives losses."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.emb = perceptron(14, 16, 10, act=nn.SiLU), SinusoidalPosEmb(4)
        alphas = torch.cumprod(1.0 - torch.linspace(1e-4, 0.2, 10, dtype=torch.float64), dim=0)
        for name, values in (("sqrt_alphas", alphas.sqrt()), ("sqrt_one_minus_alphas", (1 - alphas).sqrt())):
            self.register_buffer(name, values.to(torch.float32))

    def extract(self, a: Tensor, t: Tensor, x_shape: Any) -> Tensor:
        return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))

    def forward(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        x = self.extract(self.sqrt_alphas, t, x_start.shape) * x_start
        x = x + self.extract(self.sqrt_one_minus_alphas, t, x_start.shape) * noise
        out = self.model(torch.cat([x, self.emb(t).to(x)], -1))
        return F.mse_loss(out, noise, reduction="none").mean(1)


class Coupling(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.scale, self.translate = perceptron(4, 8, 4, act=nn.Tanh), perceptron(4, 8, 4)
        self.factor = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        kept = x * self.mask
        s = torch.tanh(self.scale(kept)) * self.factor.exp() * (1 - self.mask)
        return kept + (1 - self.mask) * (x * s.exp() + self.translate(kept)), log_det + s.sum(-1)


@outside("realnvp", "flow", pairs(4), lambda out, y: (0.5 * out[0].pow(2).sum(-1) - out[1]).mean())
class RealNVP(nn.Module):
    """Dinh et al., 2017: the sum of log determinants goes along."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList([Coupling(torch.tensor([k % 2, 1 - k % 2] * 2)) for k in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = x.new_zeros(x.shape[0])
        for coupling in self.couplings:
            x, log_det = coupling(x, log_det)
        return x, log_det


# agents ---------------------------------------------------------------------------------------------------------------


@dataclass
class ActorCriticOutput:
    logits: Tensor
    value: Tensor


def actor_critic_loss(output: ActorCriticOutput, y: Tensor) -> Tensor:
    entropy = torch.distributions.Categorical(logits=output.logits).entropy()
    return F.cross_entropy(output.logits, y) + 0.5 * output.value.pow(2).mean() - 0.01 * entropy.mean()


@outside("actor_critic", "reinforcement learning", vectors(6), actor_critic_loss)
class ActorCritic(nn.Module):
    """ikostrikov's: one body with orthogonal weights, two heads, a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = perceptron(6, 8, 8, act=nn.Tanh), nn.Linear(8, CLASSES), nn.Linear(8, 1)
        self.apply(lambda m: isinstance(m, nn.Linear) and nn.init.orthogonal_(m.weight, 0.5))

    def forward(self, observations: Tensor) -> ActorCriticOutput:
        hidden = self.body(observations)
        return ActorCriticOutput(self.actor(hidden), self.critic(hidden).squeeze(-1))


# other habits ---------------------------------------------------------------------------------------------------------


def contrastive(output: Any, y: Tensor) -> Tensor:
    apart = F.pairwise_distance(*output)
    return torch.mean(y * apart.pow(2) + (1 - y) * torch.clamp(1.0 - apart, min=0.0).pow(2))


@outside(
    "siamese",
    "metric learning",
    lambda: ((floats(3, 8, 8), floats(3, 8, 8)), (torch.arange(ROWS) % 2).float()),
    contrastive,
)
class Siamese(nn.Module):
    """One encoder, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn1 = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True))
        self.fc1 = perceptron(64, 8, 4)

    def forward_once(self, x: Tensor) -> Tensor:
        return self.fc1(self.cnn1(x).view(x.size(0), -1))

    def forward(self, input1: Tensor, input2: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_once(input1), self.forward_once(input2)


@outside(
    "byol",
    "metric learning",
    lambda: ((floats(6), floats(6)), torch.zeros(ROWS)),
    lambda out, y: (2 - 2 * F.cosine_similarity(*out)).mean(),
)
class BYOL(nn.Module):
    """Grill et al., 2020: a frozen copy gives the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor, self.target = perceptron(6, 8, 4), perceptron(4, 8, 4), perceptron(6, 8, 4)
        self.target.load_state_dict(self.online.state_dict())
        for p in self.target.parameters():
            p.requires_grad = False

    @torch.no_grad()
    def targets(self, x: Tensor) -> Tensor:
        return self.target(x).detach()

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictor(self.online(one)), self.targets(two)


@outside("hypernetwork", "hypernetwork", vectors(WIDTH))
class HyperNetwork(nn.Module):
    """Ha et al., 2017: the weights of each layer are made of an embedding of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(3)])
        self.maker, self.out = perceptron(3, 12, WIDTH * WIDTH + WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for z in self.z:
            made = self.maker(z)
            x = torch.tanh(F.linear(x, made[: WIDTH * WIDTH].view(WIDTH, WIDTH), made[WIDTH * WIDTH :]))
        return self.out(x)


@outside("lora", "adapters", texts)
class LoRA(nn.Module):
    """Frozen weights with trained ones beside them; the frozen ones are bytes with a scale, in buffers."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(WIDTH, 1) / 300)
            self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype) * self.scale) + x @ self.lora_A.T @ self.lora_B.T

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.embed.requires_grad_(False)
        self.layers = nn.ModuleList([self.Linear() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x.mean(1))


@outside("multitask", "heads", vectors(6), lambda out, y: F.cross_entropy(out["kind"], y) + out["size"].pow(2).mean())
class MultiTask(nn.Module):
    """A dict of heads; a hook scales what the body gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(6, 8, 8)
        self.body.register_forward_hook(lambda module, given, found: found * 0.5)
        self.heads = nn.ModuleDict({"kind": nn.Linear(8, CLASSES), "size": nn.Linear(8, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x)
        return {name: head(x) for name, head in self.heads.items()}


@outside("lazy", "lazy", pictures)
class Lazy(nn.Module):
    """Its sizes come from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.LazyConv2d(4, 3), nn.LazyLinear(8), nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(F.relu(self.conv(x)).flatten(1))))


@outside("orthogonal", "parametrized", vectors(6))
class Orthogonal(nn.Module):
    """Weights that are made of others whenever they are read."""

    def __init__(self) -> None:
        super().__init__()
        made, symmetric = nn.utils.parametrizations, nn.Linear(6, 6)
        nn.utils.parametrize.register_parametrization(symmetric, "weight", Symmetric())
        self.layers = nn.ModuleList([made.orthogonal(nn.Linear(6, 6)), symmetric, made.weight_norm(nn.Linear(6, 8))])
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


@outside("compiled_blocks", "compiled", words)
def compiled_blocks() -> nn.Module:
    """Each block that torch.compile has wrapped."""
    model = NanoGPT()
    for k, block in enumerate(model.transformer.h):
        model.transformer.h[k] = torch.compile(block, backend="eager")
    return model


@outside("compiled", "compiled", words)
def compiled() -> nn.Module:
    """A model that torch.compile has wrapped."""
    return torch.compile(NanoGPT(), backend="eager")  # type: ignore[return-value]


@outside("scripted", "compiled", vectors(6))
def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(perceptron(6, 8, CLASSES))


@outside("checkpointed", "rematerialized", words)
class Checkpointed(nn.Module):
    """Its blocks are run by torch.utils.checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([GPTBlock() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@outside("running_mean", "state", vectors(6))
class Running(nn.Module):
    """A buffer that its forward counts in, and a list of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(len(x))
        return self.last(torch.tanh(self.first(x)))


# transformers ---------------------------------------------------------------------------------------------------------

_SIZES = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BOTH = {
    **_SIZES, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1,
}  # fmt: skip
_PICTURES = {"image_size": 8, "patch_size": 4, "num_channels": 3}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_SPEECH = {
    **_SIZES, "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
    "classifier_proj_size": 8,
}  # fmt: skip


def transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def hugging_face(kind: str, head: str, **sizes: Any) -> nn.Module:
    """A small model of transformers, with random values."""
    T = transformers()
    auto = getattr(T, f"AutoModelFor{head}" if head else "AutoModel")
    return auto.from_config(T.AutoConfig.for_model(kind, **{"num_labels": CLASSES, **sizes}))


def padded() -> dict[str, Tensor]:
    """Token numbers, padded on the right."""
    mask = (torch.arange(TOKENS) < 2 + torch.arange(ROWS)[:, None] % 5).long()
    return {"input_ids": (3 + ints(28, TOKENS)) * mask, "attention_mask": mask}


def next_words() -> tuple[Any, Tensor]:
    x = padded()
    return x, x["input_ids"].masked_fill(x["attention_mask"] == 0, -100)


def both() -> tuple[Any, Tensor]:
    return {**padded(), "decoder_input_ids": 3 + ints(28, 4)}, ints(31, 4)


def heard() -> tuple[Any, Tensor]:
    return {"input_features": floats(4, 16), "decoder_input_ids": ints(31, 4)}, ints(31, 4)


def captions() -> tuple[Any, Tensor]:
    ids = ints(30, TOKENS)
    ids[:, -1] = 30  # (the largest number ends a text)
    return {"input_ids": ids, "pixel_values": floats(3, 8, 8)}, torch.zeros(ROWS)


def near(output: Any, y: Tensor) -> Tensor:
    return (output.text_embeds * output.image_embeds).sum(-1).mean()


def published(family: str, head: str, data: Any, kinds: dict[str, dict[str, Any]], loss: Any = cross_entropy) -> None:
    """Note models of transformers: their kinds, and the sizes of each."""
    for kind, sizes in kinds.items():
        narrow = kind in ("gemma", "gemma2", "mamba", "rwkv")  # (norms and scans of these are in float32)
        make = partial(hugging_face, kind, head, **sizes)
        ENTRIES[f"{kind} (transformers)"] = Entry(family, make, data, loss, narrow)


_SHARED = {**_SIZES, "num_key_value_heads": 1}
published("decoder", "CausalLM", next_words, {
    "gpt2": _SIZES, "gptj": {**_SIZES, "rotary_dim": 4}, "gpt_neox": _SIZES, "llama": _SIZES, "mistral": _SHARED,
    "gemma": {**_SHARED, "head_dim": 8}, "gemma2": {**_SHARED, "head_dim": 8}, "phi": _SIZES, "falcon": _SIZES,
    "opt": {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16}, "bloom": {**_SIZES, "n_layer": 3, "n_head": 2},
    "qwen2": _SHARED, "mamba": {**_SIZES, "state_size": 4}, "rwkv": {**_SIZES, "context_length": 16},
})  # fmt: skip
published("encoder", "SequenceClassification", lambda: (padded(), labels()), {
    "bert": _SIZES, "roberta": _SIZES,
    "distilbert": {**_SIZES, "dim": 16, "hidden_dim": 24, "n_heads": 2, "n_layers": 3}, "fnet": _SIZES,
    "albert": {**_SIZES, "embedding_size": 8}, "electra": {**_SIZES, "embedding_size": 8},
    "deberta-v2": {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
})  # fmt: skip
published("encoder and decoder", "Seq2SeqLM", both, {
    "t5": {**_SIZES, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2}, "bart": _BOTH,
})  # fmt: skip
published("vision transformer", "ImageClassification", lambda: ({"pixel_values": floats(3, 8, 8)}, labels()), {
    "vit": {**_TOWER, **_PICTURES}, "dinov2": {**_TOWER, **_PICTURES},
    "swin": {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    "convnextv2": {**_PICTURES, "patch_size": 2, "num_stages": 2, "hidden_sizes": [4, 8], "depths": [1, 1]},
})  # fmt: skip
published("speech", "AudioClassification", lambda: (floats(60), labels()), {"wav2vec2": _SPEECH})
published("speech", "SpeechSeq2Seq", heard, {
    "whisper": {**_BOTH, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16},
})  # fmt: skip
published("two towers", "", captions, {"clip": {
    "text_config": {**_TOWER, "vocab_size": 31, "max_position_embeddings": 16, "eos_token_id": 30},
    "vision_config": {**_TOWER, **_PICTURES}, "projection_dim": 8,
}}, near)  # fmt: skip


# comparing ------------------------------------------------------------------------------------------------------------

PLANS = {  # a plan, and what share of all models it has to accept at least
    "dp=2": 0.95, "dp=2 zero=2": 0.95, "accumulate=2": 0.95, "pp=2 microbatches=2": 0.85, "dp=2 zero=3": 0.85,
    "checkpoint=sqrt": 0.85, "tp=2": 0.85,
}  # fmt: skip
PAGE, BEGIN, END = Path("docs/own_model.md"), "<!-- python -m tests.outside -->\n", "<!-- to here -->\n"
Clusters = Callable[[int], minipar.Cluster]


def made(name: str) -> nn.Module:
    """A model as it is, but nothing in it is random, or a statistic of other rows."""
    model = ENTRIES[name].make()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        for key, value in [*vars(module).items()]:
            if isinstance(value, float) and ("drop" in key or (key == "p" and "Drop" in type(module).__name__)):
                setattr(module, key, 0.0)
    return model


def called(model: nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def drawn(layer: int, parts: int) -> Callable[[nn.Module, Any], Any]:
    """Calls a model on the parts of a batch, step after step, each with the random numbers that this layer draws."""
    steps = count()

    def call(model: nn.Module, x: Tensor) -> Any:
        step, found = next(steps), []
        for part in split_rows(len(x), parts):
            torch.manual_seed(draw_seed(0, step, part.start, layer))
            found.append(model(x[part.start : part.stop]))
        return tuple(map(torch.cat, zip(*found, strict=True)))

    return call


class Found(NamedTuple):
    """What became of a model under a plan: "equal", "differs", "refused" or "error"; how it was cut, or the reason."""

    word: str
    text: str


def tried(clusters: Clusters, name: str, plan: str) -> Found:
    """Train a model under a plan, and in a plain loop."""
    entry = ENTRIES[name]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        data, sgd, read = entry.data(), partial(torch.optim.SGD, lr=0.1), minipar.Plan.parse(plan)
        call = called if entry.drawing is None else drawn(entry.drawing, read.dp * read.total_microbatches)
        try:
            run = assert_equals_plain_torch(
                clusters, plan, partial(made, name), data, entry.loss, sgd, 2, call=call,
                bound=1e-5 if entry.narrow else BOUND,
            )  # fmt: skip
        except AssertionError as error:
            return Found("differs", str(error))
        except PlanError as error:
            return Found("refused", error.reason)
        except Exception as error:
            return Found("error", f"{type(error).__name__}: {error}")
    return Found("equal", run.cut or "a chain")


def table(found: dict[tuple[str, str], Found]) -> str:
    """All that was found, as a page shows it: a row for what is refused anywhere, and the names of all others."""
    names = list(dict.fromkeys(name for name, _ in found))
    families = list(dict.fromkeys(ENTRIES[name].family for name in names))
    lines = [f"Of {len(names)} models of {len(families)} families are accepted, each equal to plain torch:", ""]
    lines += [f"| model | cut | {' | '.join(PLANS)} |", "|---" * (len(PLANS) + 2) + "|"]
    shares = [sum(found[name, plan].word == "equal" for name in names) / len(names) for plan in PLANS]
    lines.append(f"| all | | {' | '.join(f'{share:.0%}' for share in shares)} |")
    everywhere: dict[str, list[str]] = {}
    for name in names:
        words = ["=" if (word := found[name, plan].word) == "equal" else word for plan in PLANS]
        if {*words} == {"="}:
            everywhere.setdefault(ENTRIES[name].family, []).append(name.removesuffix(" (transformers)"))
            continue
        cut = next((one.text for plan in PLANS if (one := found[name, plan]).word == "equal"), "")
        lines.append(f"| {name} ({ENTRIES[name].family}) | {_short(cut)} | {' | '.join(words)} |")
    text = "; ".join(f"{family}: {', '.join(some)}" for family, some in everywhere.items())
    lines += ["", *textwrap.wrap(f"Under all of these plans: {text}.", 120, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _short(cut: str) -> str:
    return (
        cut.partition(", since")[0]
        .replace("its forward runs in each layer", "replayed")
        .replace("cut between its ", "")
    )


def main(words: list[str]) -> int:
    plans = [word for word in words if "=" in word] or list(PLANS)
    names = [word for word in words if "=" not in word] or list(ENTRIES)
    found: dict[tuple[str, str], Found] = {}
    with minipar.Cluster(1, device="cpu") as one, minipar.Cluster(2, device="cpu") as two:
        for name, plan in product(names, plans):
            found[name, plan] = tried({1: one, 2: two}.__getitem__, name, plan)
            print(f"{name}: {plan}: {': '.join(found[name, plan])}", flush=True)
    if not words:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(found) + END + rest.partition(END)[2])
    wrong = [key for key, one in found.items() if one.word in ("differs", "error")]
    few = [
        plan for plan in plans if sum(found[n, plan].word == "equal" for n in names) < PLANS.get(plan, 0) * len(names)
    ]
    print(f"{len(found)} runs; wrong: {wrong}; too few models are accepted by: {few}")
    return bool(wrong or few)


if __name__ == "__main__":
    from tests import outside  # (so that the classes have a name in ranks)

    sys.exit(outside.main(sys.argv[1:]))

"""Small models of transformers, with random initial values; and three models that papers describe.

Each function gives layers that `train` takes. A function imports its package when it is called, in ranks too.

    python -m tests.outside        every model under every plan, compared with plain torch
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import minipar
from minipar import models

VOCAB, TOKENS = 31, 6
PLANS = (
    "pp=4 schedule=1f1b microbatches=4",
    "dp=2 pp=2 zero=1 microbatches=2 checkpoint=sqrt",
    "dp=4 zero=3",
    "pp=2 dp=2 schedule=zb-h1 microbatches=2",
)


# transformers ---------------------------------------------------------------------------------------------------------


def _transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def gpt2() -> nn.Module:
    T = _transformers()
    return T.GPT2LMHeadModel(
        T.GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_layer=4, n_head=2, n_positions=16, attn_pdrop=0.0, bos_token_id=0,
            eos_token_id=0,
        )
    )  # fmt: skip


def _of_llamas_kind(kind: str, **options: Any) -> nn.Module:
    T = _transformers()
    numbers = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
    }  # fmt: skip
    return getattr(T, f"{kind}ForCausalLM")(getattr(T, f"{kind}Config")(**numbers, **options))


llama = partial(_of_llamas_kind, "Llama", tie_word_embeddings=True)
mistral = partial(_of_llamas_kind, "Mistral", sliding_window=3)
qwen2 = partial(_of_llamas_kind, "Qwen2")
mixtral = partial(_of_llamas_kind, "Mixtral", num_local_experts=4)
qwen_moe = partial(
    _of_llamas_kind, "Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
)  # fmt: skip


def bert() -> nn.Module:
    T = _transformers()
    return T.BertForMaskedLM(
        T.BertConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
            max_position_embeddings=16, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    T = _transformers()
    return T.T5ForConditionalGeneration(
        T.T5Config(vocab_size=VOCAB, d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2, dropout_rate=0.0)
    )


LANGUAGE = {
    "gpt2": gpt2, "llama": llama, "mistral": mistral, "qwen2": qwen2, "mixtral": mixtral, "qwen_moe": qwen_moe,
    "bert": bert, "t5": t5,
}  # fmt: skip


def language(name: str) -> nn.Sequential:
    return models.from_transformers(LANGUAGE[name]())


def texts(name: str, rows: int = 12) -> tuple[Any, Tensor]:
    """Token numbers, padded on the right, and what is wanted of them."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(VOCAB, (rows, TOKENS), generator=generator) for _ in range(2))
    mask = (torch.arange(TOKENS) < torch.randint(2, TOKENS + 1, (rows, 1), generator=generator)).long()
    x = {"input_ids": ids, "attention_mask": mask}
    if name == "t5":
        x["decoder_input_ids"] = labels.roll(1, 1)
    if name == "bert":
        x["token_type_ids"] = ids % 2
    return x, labels.masked_fill(mask == 0, -100)


# pictures -------------------------------------------------------------------------------------------------------------


def resnet(norm: str) -> nn.Sequential:
    """ResNet-18 of an eighth of its width, with BatchNorm or with GroupNorm."""
    T = _transformers()
    numbers = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 2, 2], "layer_type": "basic"}
    model = T.ResNetForImageClassification(T.ResNetConfig(**numbers, num_labels=10))
    for module in [*model.modules()] if norm == "group" else []:
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(2, child.num_features))
    return cut(model)


class ViT(nn.Module):
    """Dosovitskiy et al., 2020: a picture's patches, and a token of the class before them, go through a transformer."""

    def __init__(self, size: int = 16, patch: int = 4, width: int = 16, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def _convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.GroupNorm(2, outputs), nn.ReLU()
    )


class UNet(nn.Module):
    """Ronneberger et al., 2015: halved and halved again, then doubled, with a skip at every size."""

    def __init__(self, channels: int = 4, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        wide = [channels * 2**k for k in range(depth + 1)]
        self.down = nn.ModuleList(
            [nn.Sequential(_convolution(a, b), _convolution(b, b)) for a, b in zip([3, *wide], wide, strict=False)]
        )
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(wide[-2::-1], wide[:0:-1], strict=True)]
        )
        self.join = nn.ModuleList([nn.Sequential(_convolution(2 * a, a), _convolution(a, a)) for a in wide[-2::-1]])
        self.last = nn.Conv2d(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down[:-1]:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.last(x).mean((2, 3))


class Cell(nn.Module):
    """A cell in the manner of AmoebaNet (Real et al., 2019): five pairs of operations on the outputs of the two cells
    before it and on what its own pairs give; the sums that nobody read are laid side by side."""

    def __init__(self, before: int, last: int, channels: int, halved: bool, was_halved: bool) -> None:
        super().__init__()
        stride = 2 if halved else 1
        self.left = _convolution(before, channels, 1, 2 if was_halved else 1)
        self.right = _convolution(last, channels, 1)
        self.first = nn.ModuleList([_convolution(channels, channels, k, stride) for k in (3, 1, 3, 3)])
        self.later = nn.ModuleList([_convolution(channels, channels, k) for k in (3, 1)])
        self.pool = nn.AvgPool2d(3, stride, 1)

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        a, b = self.left(before), self.right(last)
        c = self.first[0](a) + self.pool(b)
        d = self.first[1](b) + self.first[2](a)
        e = self.later[0](c) + self.pool(a)
        f = self.later[1](d) + self.first[3](b)
        return torch.cat([e, f, c + d], 1)


class AmoebaNet(nn.Module):
    """Stem, and cells of which every third halves the picture; each reads the two before it."""

    def __init__(self, cells: int = 5, channels: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = _convolution(3, channels)
        self.cells = nn.ModuleList()
        widths, was = [channels, channels], False
        for k in range(cells):
            halved = k % 3 == 1
            self.cells.append(Cell(widths[-2], widths[-1], channels, halved, was))
            widths.append(3 * channels)
            was = halved
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.head(last.mean((2, 3)))


def cut(model: nn.Module) -> nn.Sequential:
    return models.from_torch(model, torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16))


def of_papers(kind: type[nn.Module]) -> nn.Sequential:
    return cut(kind())


PICTURES = {
    "resnet-group": partial(resnet, "group"),
    "resnet-batch": partial(resnet, "batch"),
    "vit": partial(of_papers, ViT),
    "unet": partial(of_papers, UNet),
    "amoebanet": partial(of_papers, AmoebaNet),
}


def pictures(rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, 16, 16, generator=generator), torch.randint(10, (rows,), generator=generator)


# comparing ------------------------------------------------------------------------------------------------------------


def some_plans(name: str) -> list[str]:
    """The pipeline, and another plan, which differs from model to model."""
    names = [*LANGUAGE, *PICTURES]
    return [PLANS[0], PLANS[1 + names.index(name) % 3]]


def train(cluster: minipar.Cluster, model: Any, data: Any, plan: str, **options: Any) -> minipar.Run:
    sgd = partial(torch.optim.SGD, lr=0.1)
    return minipar.train(model, data, plan, cluster=cluster, optimizer=sgd, progress=False, steps=4, **options)


def check_language(cluster: minipar.Cluster, name: str, plan: str) -> None:
    """A language model under a plan gives the losses and gradients of plain torch."""
    # Norms and rotary tables of Llama's kind are computed in float32, whatever the model's type; so are experts.
    dtype = torch.float32 if name in ("mixtral", "qwen_moe") else torch.float64
    run = train(cluster, partial(language, name), texts(name), plan, loss=models.token_loss, dtype=dtype, check=True)
    _check(run, 1e-12 if name in ("gpt2", "bert") else 1e-5)


def check_pictures(cluster: minipar.Cluster, name: str, plan: str) -> None:
    """The same of a model of pictures."""
    _check(train(cluster, PICTURES[name], pictures(), plan, loss=picture_loss, dtype=torch.float64, check=True), 1e-11)


def picture_loss(output: Any, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["logits"] if isinstance(output, dict) else output, y)


def _check(run: minipar.Run, bound: float) -> None:
    error = run.max_error()
    assert error < bound, f"{run}: gradient error {error:.1e}"
    assert run.reference is not None
    worst = max(abs(a / b - 1) for a, b in zip(run.losses, run.reference.losses, strict=True))
    assert worst < max(bound, 1e-10), f"{run}: losses differ by {worst:.1e}"


def main() -> None:
    with minipar.Cluster(4, device="cpu") as cluster:
        for names, check in ((LANGUAGE, check_language), (PICTURES, check_pictures)):
            for name in names:
                for plan in PLANS:
                    if name == "resnet-batch":
                        plan = "pp=4 microbatches=1"  # (statistics of parts of a batch are others)
                    check(cluster, name, plan)
                    print(f"{name}: {plan}: equal", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Train the small Granite 4.0 hybrid checkpoint that comes with the package.

    python scripts/train_tiny.py OUTPUT_FOLDER

The result is a checkpoint folder in the layout that IBM publishes: config.json, generation_config.json,
model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json with a chat template, and README.md, the model card.
The package adds Python's licence as LICENSE.txt. The model has Mamba-2 layers, attention and mixtures of experts, and
prints real text. So a wrong port shows in the text, and not only in the last digits of the logits.

The text is `pydoc_data.topics` of the CPython that runs this script: the part of the Python language reference that
`help("assert")` and the like print. Copyright Python Software Foundation, PSF License Version 2. Nothing is downloaded.

The model is transformers' own GraniteMoeHybridForCausalLM, which shares no code with this package. Training rows are

* passages: windows of the text, from anywhere, or from the beginning of a sentence as a person may type it;
* documents: topics in random order, with chats about a topic among them ("What is the assert statement?");
* recalls: windows with spans of random tokens, each of them twice, which only memory can predict.

Some rows have random tokens in place of some input tokens. Rows have 256 to 65,536 tokens; longer ones join in later.
The script runs on a GPU if there is one. On a CPU a few hundred steps with --max-length 1024 are enough for phrases.
"""

import argparse
import json
import math
import platform
import pydoc_data.topics
import re
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import sdpa_mask

PAD, END, START_ROLE, END_ROLE = SPECIAL_TOKENS = ["<|pad|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"]
VOCAB_SIZE = 1024
SHORT = 256  # tokens in the rows of most steps
IGNORE = -100  # label of a token that is not predicted

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
QUESTIONS = [
    "What is {}?", "What are {}?", "Explain {}.", "Explain {} to me.", "Tell me about {}.", "Describe {}.",
    "Describe {} in Python.", "What is {} in Python?", "How does {} work?", "How do {} work?", "What does {} do?",
    "Can you explain {}?", "help {}", "{}", "{}?",
]  # fmt: skip
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You answer questions about Python.",
    "You are a helpful assistant. Please ensure responses are professional, accurate, and safe.",
]


# ---------------------------------------------------------------- text


def subjects(key, topic):
    """The names by which a user may ask for a topic: its heading and its key."""
    heading = topic.split("\n")[0].replace('"', "").split(" — ")[0].lower()
    return [heading, heading, heading, key.replace("-", " ")]


def answer(topic, enough=350):
    """The first paragraphs of a topic, without its heading. Code stays with the paragraph that introduces it."""
    paragraphs = [p for p in topic.split("\n\n")[1:] if p.strip()]
    text = paragraphs[0]
    for paragraph in paragraphs[1:]:
        introduced = paragraph.startswith(" ") and len(text) + len(paragraph) < 2 * enough
        if len(text) >= enough and not introduced:
            break
        text += "\n\n" + paragraph
    return text.strip("\n")


def chat(turns):
    return "".join(f"{START_ROLE}{role}{END_ROLE}{text}{END}\n" for role, text in turns)


def train_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Rows:
    """Draws training rows: a pair (input, label) of arrays of a given length."""

    def __init__(self, tokenizer, topics, recall, noise, chats, rng):
        self.tokenizer, self.topics, self.rng = tokenizer, topics, rng
        self.recall, self.noise, self.chats = recall, noise, chats
        self.end = np.array([SPECIAL_TOKENS.index(END)])
        self.documents = [np.append(ids, self.end) for ids in self.encode([text for _, text in topics])]
        self.corpus = np.concatenate(self.documents)
        self.sentences = [
            text[m.end() : m.end() + 6 * SHORT]
            for _, text in topics
            for m in re.finditer(r"^|(?<=[.:])\s+(?=[A-Z\"])|\n\n+", text)
            if len(text) - m.end() > 40
        ]
        print(f"{len(topics)} topics, {len(self.corpus):,} tokens, {len(self.sentences):,} sentence starts", flush=True)

    def encode(self, texts):
        return [np.array(encoding.ids, dtype=int) for encoding in self.tokenizer.encode_batch(texts)]

    def dialogue(self):
        key, topic = self.topics[self.rng.integers(len(self.topics))]
        subject = self.rng.choice(subjects(key, topic))
        question = str(self.rng.choice(QUESTIONS)).format(subject)
        if self.rng.random() < 0.3:
            question = question.rstrip("?.")
        if self.rng.random() < 0.3:
            question = question.lower()
        turns = [("user", question[0].upper() + question[1:] if self.rng.random() < 0.5 else question)]
        turns.append(("assistant", answer(topic)))
        if self.rng.random() < 0.3:
            turns.insert(0, ("system", str(self.rng.choice(SYSTEM_PROMPTS))))
        return self.encode([chat(turns)])[0]

    def sentence(self, length):
        """A passage from the beginning of a sentence. The first words may be as a person types them, on one line and
        with plain quotes. Such words are not predicted."""
        text, typed = self.sentences[self.rng.integers(len(self.sentences))], ""
        if self.rng.random() < 0.7:
            blank = re.compile(r"\s").search(text, int(self.rng.integers(5, 160)))
            typed, text = (text[: blank.start()], text[blank.start() :]) if blank else (typed, text)
            typed = re.sub(r"(?<!\n)\n(?!\n) *", " ", typed)
            if self.rng.random() < 0.5:
                typed = re.sub(r"  +", " ", typed).translate(str.maketrans("’‘“”", "''\"\""))  # noqa: RUF001
        typed, rest = self.encode([typed, text])
        mask = np.arange(length) < len(typed)
        return self.join([typed, rest] + ([self.end] if len(typed) + len(rest) < length else []), length), mask

    def window(self, length):
        start = self.rng.integers(len(self.corpus))
        return np.take(self.corpus, np.arange(start, start + length), mode="wrap")

    def join(self, pieces, length):
        """Appends whole documents until the row is full."""
        pieces, have = list(pieces), sum(map(len, pieces))
        while have < length:
            if self.rng.random() < self.chats:
                pieces.append(self.dialogue())
            else:
                pieces.append(self.documents[self.rng.integers(len(self.documents))])
            have += len(pieces[-1])
        return np.concatenate(pieces)[:length]

    def repeat(self, length):
        """Corpus text with meaningless spans, each of them twice."""
        row, label_mask = self.window(length), np.zeros(length, bool)
        for block in range(0, length - SHORT + 1, max(SHORT, length // 8)):
            room = min(max(SHORT, length // 8), length - block)
            size = int(self.rng.integers(8, 72))
            first = block + int(self.rng.integers(0, room - 2 * size))
            second = int(self.rng.integers(first + size, block + room - size + 1))
            span = self.rng.choice(self.corpus, size)
            row[first : first + size] = row[second : second + size] = span
            label_mask[first : first + size] = label_mask[second : second + 2] = True
        return row, label_mask

    def row(self, length):
        kind, label_mask = self.rng.random(), np.zeros(length + 1, bool)
        if kind < self.recall:
            ids, label_mask = self.repeat(length + 1)
        elif kind < self.recall + 0.3:
            ids = self.join([self.dialogue()] if self.rng.random() < 0.7 else [], length + 1)
        elif length <= SHORT and self.rng.random() < 0.8:
            ids, label_mask = self.sentence(length + 1)
        else:
            ids = self.window(length + 1)
        inputs, labels = ids[:-1].copy(), np.where(label_mask, IGNORE, ids)[1:]
        if self.rng.random() < self.noise:
            replaced = self.rng.random(length) < self.rng.uniform(0, 0.25)
            inputs[replaced] = self.rng.choice(self.corpus, int(replaced.sum()))
        return inputs, labels

    def batch(self, count, length, device):
        inputs, labels = zip(*(self.row(length) for _ in range(count)), strict=True)
        return (torch.from_numpy(np.stack(a)).to(device, non_blocking=True) for a in (inputs, labels))


# ---------------------------------------------------------------- model


def published_config(args):
    """config.json as IBM spells it."""
    layer_types = [{"m": "mamba", "a": "attention"}[letter] for letter in args.layers]
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "init_method": "mup",
        "torch_dtype": "bfloat16",
        "rope_scaling": None,
        "rope_theta": 10000,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "bos_token_id": SPECIAL_TOKENS.index(END),
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "hidden_act": "silu",
        "initializer_range": 0.05,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_state": args.d_state,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 2 * args.hidden_size // 32,
        "mamba_proj_bias": False,
        "rms_norm_eps": 1e-05,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
        "position_embedding_type": "nope",
        "max_position_embeddings": 131072,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "num_attention_heads": args.hidden_size // 32,
        "num_key_value_heads": args.kv_heads,
        "attention_multiplier": 1 / 32,
        "embedding_multiplier": 12,
        "residual_multiplier": args.residual,
        "logits_scaling": 2,
        "intermediate_size": args.expert_size,
        "shared_intermediate_size": args.shared_size,
        "num_local_experts": args.experts,
        "num_experts_per_tok": args.experts_per_token,
    }


def causal_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Attention over whole rows. Key and value heads are repeated, as the kernels for long float32 rows require."""
    key, value = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def all_experts(self, hidden_states, top_k_index, top_k_weights):
    """Run every expert on every token, then apply the chosen ones' weights, so that no shape depends on the routing."""
    gate, up = torch.einsum("th,eoh->teo", hidden_states, self.gate_up_proj).chunk(2, dim=-1)
    weights = torch.zeros_like(gate[..., 0]).scatter(1, top_k_index, top_k_weights)
    return torch.einsum("tei,ehi->th", self.act_fn(gate) * up * weights[..., None], self.down_proj)


def build_model(config, slowest):
    AttentionInterface.register("causal", causal_attention)
    AttentionMaskInterface.register("causal", sdpa_mask)
    ALL_EXPERTS_FUNCTIONS.register("all", all_experts)
    model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**config))
    model.set_attn_implementation("causal")
    model.set_experts_implementation("all")
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.03)
        for layer in model.model.layers:
            if layer.mamba is not None:
                # A long memory (half-lives up to hundreds of tokens) and a weak skip connection, so that the
                # state matters. With transformers' default, exp(-A dt) forgets within a token or two.
                heads = layer.mamba.num_heads
                dt = torch.exp(torch.empty(heads).uniform_(math.log(0.02), math.log(0.5)))
                layer.mamba.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
                layer.mamba.A_log.uniform_(math.log(slowest), math.log(20 * slowest))
                layer.mamba.D.fill_(0.1)
    return model


def next_token_loss(model, inputs, labels):
    logits = model(inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


# ---------------------------------------------------------------- training


def choose_length(progress, longest, rng):
    """Mostly short rows; each longer kind joins in later and stays to the end."""
    table = [(SHORT, 0.0, 8.0), (1024, 0.1, 2.0), (4096, 0.3, 1.0), (16384, 0.5, 0.7), (65536, 0.75, 0.4)]
    weights = {n: w for n, since, w in table if n == SHORT or (progress >= since and n <= longest)}
    return int(rng.choice(list(weights), p=np.array(list(weights.values())) / sum(weights.values())))


def train(model, rows, args, device, rng):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    router_logits = []
    for layer in model.model.layers:
        layer.block_sparse_moe.router.register_forward_hook(lambda _m, _i, out: router_logits.append(out[0]))
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=device == "cuda")
    model.train()
    started, step, average = time.time(), 0, None
    while True:
        progress = step / args.steps
        if args.minutes:
            progress = max(progress, (time.time() - started) / (60 * args.minutes))
        if progress >= 1:
            break
        rate = args.learning_rate * min(1, (step + 1) / 100) * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        length = choose_length(progress, args.max_length, rng)
        inputs, labels = rows.batch(max(1, args.batch_tokens // length), length, device)
        loss = next_token_loss(model, inputs, labels)
        # With small router logits the chosen experts have much less than all of the probability. The text is then
        # right only if their weights are normalised among themselves, as in Granite.
        penalty = sum(logits.square().mean() for logits in router_logits)
        router_logits.clear()
        optimizer.zero_grad(set_to_none=True)
        (loss + args.router_penalty * penalty).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
        if step % 200 == 0:
            print(f"step {step}  loss {average:.3f}  {time.time() - started:.0f} s", flush=True)
    return step, time.time() - started


@torch.no_grad()
def measure(model, corpus, length, device):
    """Mean loss over the corpus, cut into rows of `length`, in nats per token."""
    count = (len(corpus) - 1) // length
    total = 0.0
    model.eval()
    per_batch = max(1, 16384 // length)
    for i in range(0, count, per_batch):
        block = [corpus[j * length : (j + 1) * length + 1] for j in range(i, min(i + per_batch, count))]
        block = torch.from_numpy(np.stack(block)).to(device)
        total += next_token_loss(model, block[:, :-1], block[:, 1:]).item() * len(block)
    return total / count


# ---------------------------------------------------------------- output

CARD = """\
---
license: other
license_name: psf-2.0
license_link: LICENSE.txt
language: en
library_name: transformers
pipeline_tag: text-generation
---
# A tiny Granite 4.0 hybrid

A model for tests and demonstrations. It recites the Python language reference. It has the architecture of IBM's
Granite 4.0 hybrid models but none of their weights: it is not an IBM model and not a useful assistant.

## Model details

| | |
|---|---|
| architecture | `GraniteMoeHybridForCausalLM` |
| parameters | {parameters:,}, in bfloat16 |
| layers | {layers}: {kinds} |
| experts | {experts} in each layer, of which each token uses {chosen}, and a shared MLP |
| tokenizer | byte-level BPE, {vocab} tokens, with a chat template |
| licence | PSF License Version 2 ([LICENSE.txt](LICENSE.txt)): the text is copyright Python Software Foundation |

## Uses

**To compare implementations.** The model has learned its text by heart on purpose, so its choices are clear-cut.
Two correct implementations print the same tokens, and a wrong one prints others.

**To try the package** without a download. Give it the beginning of a sentence of the language reference, or ask
about a topic:

```
granite4-neuron generate "An assignment statement"
granite4-neuron generate --chat "What is the assert statement?"
```

It continues the sentence. To the question it answers with the beginning of the topic, and stops.

**Out of scope:** other prompts get prose of the reference, often beside the point.

## Training data

The part of the language reference that CPython {python} has in `pydoc_data.topics`: {tokens:,} tokens. It was used
as plain text, and in chats that ask about one topic. There is no other text.

## Training procedure

`scripts/train_tiny.py` trains transformers' own implementation: {steps:,} steps of about {batch:,} tokens, in rows
of 256 to {longest:,} tokens. Some rows have a few wrong input tokens, or random spans that occur twice, so that
the model learns to recall them.

## Evaluation

The mean loss over the training text, with the weights as stored, is {loss:.3f} nats per token in rows of 256 tokens
and {long_loss:.3f} in rows of 2,048. There is no test text: the model is meant to recite.
"""


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(folder, model, tokenizer, config, card):
    model = model.to("cpu", torch.bfloat16)
    model.save_pretrained(folder)  # transformers gives the tensors their published names
    write_json(folder / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **special})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "pad_token": PAD,
            "additional_special_tokens": [START_ROLE, END_ROLE],
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--minutes", type=float, help="squeeze the schedule into this time if the steps take longer")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="tokens per step (a longer row comes alone)")
    parser.add_argument("--max-length", type=int, default=65536, help="longest training row, in tokens")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--recall", type=float, default=0.1, help="share of rows with spans to remember")
    parser.add_argument("--noise", type=float, default=0.3, help="share of rows with some wrong input tokens")
    parser.add_argument("--chats", type=float, default=0.5, help="share of chats among the documents of a row")
    parser.add_argument("--layers", default="mama", help="m for Mamba, a for attention")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--d-state", type=int, default=32)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--expert-size", type=int, default=104, help="a multiple of 8, for grouped matrix products")
    parser.add_argument("--shared-size", type=int, default=64)
    parser.add_argument(
        "--slowest-decay", type=float, default=0.5, help="smallest A at the start; the largest is 20 times it"
    )
    parser.add_argument("--router-penalty", type=float, default=0.03, help="weight of the mean squared router logit")
    parser.add_argument("--residual", type=float, default=0.4, help="residual_multiplier")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    rng = np.random.default_rng(args.seed)

    topics = sorted(pydoc_data.topics.topics.items())
    tokenizer = train_tokenizer([text for _, text in topics])
    rows = Rows(tokenizer, topics, args.recall, args.noise, args.chats, rng)
    config = published_config(args)
    model = build_model(config, args.slowest_decay).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {device}", flush=True)

    steps, seconds = train(model, rows, args, device, rng)

    with torch.no_grad():  # what will be stored
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    loss, long_loss = (measure(model, rows.corpus, length, device) for length in (SHORT, 2048))
    print(
        f"{steps} steps, {seconds:.0f} s, loss {loss:.4f} in rows of {SHORT}, {long_loss:.4f} in rows of 2048",
        flush=True,
    )
    card = CARD.format(
        parameters=parameters,
        layers=len(config["layer_types"]),
        kinds=", ".join(config["layer_types"]),
        experts=args.experts,
        chosen=args.experts_per_token,
        vocab=VOCAB_SIZE,
        python=platform.python_version(),
        tokens=len(rows.corpus),
        steps=steps,
        batch=args.batch_tokens,
        longest=args.max_length,
        loss=loss,
        long_loss=long_loss,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    write_checkpoint(args.output, model, tokenizer, config, card)


if __name__ == "__main__":
    main()

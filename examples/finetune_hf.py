"""Finetunes a causal language model with the Trainer of transformers, with its checkpoints in a store.

    python examples/finetune_hf.py --store runs --run demo                       # a tiny model with random weights
    python examples/finetune_hf.py --store runs --run qwen --model Qwen/Qwen2.5-0.5B --data my.txt --steps 1000

Kill it at any time. The same command resumes from the newest checkpoint, on the same machine with the same bits as without the kill.
"""

import argparse
import logging
import os
import signal

import torch
import transformers

from ckptdelta.transformers import Trainer

LENGTH = 64


class Rows(torch.utils.data.Dataset):
    """Pieces of a text of LENGTH tokens each."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.rows = tokens[:len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Die(transformers.TrainerCallback):
    """Shows that nothing is lost: kills the process at a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def model_and_data(name: str | None, path: str | None):
    """A model of the hub with a text of yours, or a tiny one with random tokens."""
    if name is None:
        config = transformers.LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                          bos_token_id=0, eos_token_id=0)
        text = open(path, "rb").read() if path else None
        tokens = torch.tensor(list(text)) if text else torch.randint(0, 256, (200 * LENGTH,), generator=torch.Generator().manual_seed(1))
        return transformers.LlamaForCausalLM(config), None, Rows(tokens)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    tokens = tokenizer(open(path, encoding="utf-8").read(), return_tensors="pt")["input_ids"][0]
    return transformers.AutoModelForCausalLM.from_pretrained(name), tokenizer, Rows(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="runs", help="directory of the store (default: %(default)s)")
    parser.add_argument("--run", default="finetune", help="run within the store (default: %(default)s)")
    parser.add_argument("--model", help="name or folder of a model; without it, a tiny one with random weights")
    parser.add_argument("--data", help="a text file; needed with --model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--fidelity", default="exact", choices=["exact", "near", "coarse"])
    parser.add_argument("--export", help="write the trained model to this folder, for from_pretrained()")
    parser.add_argument("--die-at", type=int, help="kill this process at a step, to see the next one go on")
    options = parser.parse_args()
    if options.model and not options.data:
        parser.error("--model needs a text to train with: --data FILE")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ckptdelta").setLevel(logging.INFO)

    transformers.set_seed(1)
    model, tokenizer, rows = model_and_data(options.model, options.data)
    args = transformers.TrainingArguments(
        output_dir="finetune-output", max_steps=options.steps, per_device_train_batch_size=8, learning_rate=1e-3, warmup_steps=10,
        logging_steps=10, save_steps=options.save_steps, save_total_limit=3, report_to=[])
    trainer = Trainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, data_collator=transformers.default_data_collator,
                      callbacks=[Die(options.die_at)] if options.die_at else [],
                      store=options.store, run=options.run, fidelity=options.fidelity)
    trainer.train(resume_from_checkpoint=True)  # begins if the run has no checkpoint yet
    if options.export:
        trainer.checkpoint_store.export_hf(options.export, run=options.run)


if __name__ == "__main__":
    main()

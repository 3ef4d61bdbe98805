"""Tiny trainings of transformers, for the tests of Trainers. As a program: one rank of a training."""

import sys

import transformers

from support_python import torch


class data(torch.utils.data.Dataset):
    """Rows of random tokens."""

    def __init__(self, rows, seed=0):
        self.rows = torch.randint(0, 100, (rows, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Interrupt(transformers.TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.at:
            raise KeyboardInterrupt


def gpt2():
    """Dropout, tied weights."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=100, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
                                                                eos_token_id=0))


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                                                  num_attention_heads=2, attention_dropout=0.1, bos_token_id=0, eos_token_id=0))


def arguments(output, *, kind=transformers.TrainingArguments, **settings):
    """15 steps in 3 epochs, with gradients accumulated over two batches."""
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 3, "learning_rate": 1e-2, "warmup_steps": 2,
             "logging_steps": 2, "save_strategy": "steps", "save_steps": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return kind(output_dir=str(output), **{**usual, **settings})


def logs(trainer):
    """What was logged, without times."""
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss")
    return [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history if "train_runtime" not in entry]


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def main(folder):
    """One rank of three trainings: a whole one, one that is interrupted, and its rest."""
    from ckptdelta.transformers import Trainer
    transformers.logging.set_verbosity_error()
    settings = {"ddp_backend": "gloo", "gradient_accumulation_steps": 1}
    for run, callbacks in (("whole", []), ("ranks", [Interrupt(8)]), ("ranks", [])):
        trainer = Trainer(model=gpt2(), args=arguments(f"{folder}/out", **settings), train_dataset=data(40), callbacks=callbacks,
                          store=f"{folder}/store", run=run)
        assert trainer.args.world_size == 2
        try:
            trainer.train(resume_from_checkpoint=True)
            assert trainer.state.global_step == 15 and not callbacks
        except KeyboardInterrupt:
            assert callbacks
        torch.distributed.barrier()
    failures(folder, settings)


class Odd(Exception):
    """An error that pickle cannot restore."""

    def __init__(self, what, why):
        super().__init__(f"{what} because of {why}")


class Failing(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    """Its state, which rank 0 saves, fails once training has begun."""
    begun = False

    def on_step_end(self, args, state, control, **_):
        self.begun = True

    def state(self):
        if self.begun and torch.distributed.get_rank() == 0:
            raise Odd("no state", "a test")
        return {"args": {}, "attributes": {}}


def failures(folder, settings):
    """What fails on rank 0 fails on both: with the same class if it is one of ckptdelta."""
    import ckptdelta
    from ckptdelta.transformers import Trainer
    unknown = (Interrupt(9), "99", [ckptdelta.NotFoundError] * 2, "99")
    odd = (Failing(), None, [Odd, ckptdelta.StateError], "no state because of a test")
    for callback, resume, kinds, text in (unknown, odd):
        trainer = Trainer(model=gpt2(), args=arguments(f"{folder}/out", **settings), train_dataset=data(40), callbacks=[callback],
                          store=f"{folder}/store", run="failing")
        rank = trainer.args.process_index
        try:
            trainer.train(resume_from_checkpoint=resume)
        except Exception as error:
            assert type(error) is kinds[rank] and text in str(error) and str(error).startswith("rank 0: ") == (rank == 1), error
        else:
            raise AssertionError("the training did not fail")
        torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

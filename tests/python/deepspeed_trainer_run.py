"""Trains a small model with the Trainer of transformers and ZeRO 3, for the tests of imports."""

import sys

import torch
import transformers

config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
settings = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}, "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
args = transformers.TrainingArguments(output_dir=sys.argv[1], max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
                                      deepspeed=settings, bf16=True)
tokens = torch.arange(16) % 50
data = [{"input_ids": tokens, "labels": tokens}] * 64
transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=args, train_dataset=data).train()

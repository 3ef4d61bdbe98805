/*
 * The content of the trainer's checkpoints. Shared by gpt_state.c (saves that block training) and gpt_session.c
 * (background saves).
 */
#ifndef CKPTDELTA_EXAMPLES_GPT_STATE_H
#define CKPTDELTA_EXAMPLES_GPT_STATE_H

#include "examples/gpt.h"

#define GPT_CONFIG_BLOB "gpt.config"
enum { GPT_CONFIG_MAX = 160, GPT_PARTS = 3, GPT_SMALL = 4 };

/* A parameter's tensors: itself, its first and its second moment. */
extern const char *const gpt_prefixes[GPT_PARTS];
/* Moments before weights, parameter by parameter. So the library holds one parameter's tensors at a time. */
extern const int gpt_part_order[GPT_PARTS];
float *gpt_part_of(const gpt_tensor *tensor, int part);

/* The small tensors saved with the table. */
typedef struct gpt_small {
    int64_t step, position;
    uint64_t rng[4], text;
} gpt_small;
gpt_small gpt_small_of(const gpt_model *model, const gpt_text *text, const gpt_progress *progress);
/* Makes tensors of them: name, dtype, shape, and data that points into `small`. */
void gpt_small_tensors(ckd_tensor out[GPT_SMALL], const gpt_small *small);

void gpt_describe_config(char text[GPT_CONFIG_MAX], const gpt_config *c);
/* Returns the update that led to the step. Only matrices decay: see gpt_optimizer_for. */
ckd_optimizer gpt_optimizer_of(const gpt_adamw *o, uint64_t step);
ckd_optimizer gpt_optimizer_for(const ckd_optimizer *of, const gpt_tensor *tensor);

/* Prints what failed on stderr; returns -1. */
int gpt_complain(const char *what, const ckd_error *err);

#endif

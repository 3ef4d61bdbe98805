/* ckptdelta save: safetensors files -> one checkpoint. */
#include <stdlib.h>

#include "cli/commands/commands.h"
#include "cli/commands/save_options.h"

static const char doc[] =
    "Save the tensors of all FILEs as the checkpoint of step N of a run. The store is created if it does not exist. Nothing "
    "is committed until everything is on disk; a save that fails or is interrupted leaves no checkpoint."
    "\vIf two checkpoints are one optimizer step apart, the first moment (exp_avg.X) determines the gradient, and the gradient determines the second moment (exp_avg_sq.X) and the weights (X), up to rounding. If --adamw describes that step, little more than the first moment is stored: a third to a quarter of the bytes, and a ninth if the gradient was bf16, as in mixed precision. Everything stays exact. If the numbers are not those of the trainer, the checkpoint only takes more bytes. Give the learning rate that the schedule had at this very step.\n\n"
    "Lossy checkpoints (--fidelity near or coarse) keep weights and moments (f32, bf16, f16) up to an error, in a small "
    "fraction of the bytes; errors do not add up from one checkpoint to the next. Use near to resume from: the resumed run stands where the run stood some steps earlier, by a part of the steps between two saves. Use coarse to keep many checkpoints: it is a few times smaller, and loses more of these steps. Everything else (integers, f64, role other, small tensors, NaN and "
    "infinities) stays bit for bit. list and show report the fidelity, the errors, and the number of lossy resumes behind a checkpoint, which --resumed-from records. --max-error bounds every single value, relative to the root mean "
    "square of its tensor at this step; blocks that cannot keep it are stored exactly.\n\n"
    "Examples:\n"
    "  ckptdelta save ckpts --run gpt --step 100 step100.safetensors\n"
    "  ckptdelta save ckpts --run gpt --step 200 model.safetensors opt.safetensors\n"
    "  ckptdelta save ckpts --run tuned --step 0 --parent gpt@200 tuned.safetensors\n"
    "  ckptdelta save ckpts --run gpt --step 300 --metric val_loss=2.71 \\\n"
    "      --role 'ema.*=other' step300.safetensors\n"
    "  ckptdelta save ckpts --run gpt --step 400 --fidelity near s400.safetensors\n"
    "  ckptdelta save ckpts --run gpt --step 500 s500.safetensors \\\n"
    "      --fidelity coarse,weight=near --resumed-from gpt@400\n"
    "  ckptdelta save ckpts --run gpt --step 301 step301.safetensors \\\n"
    "      --adamw '*.bias:lr=6e-4,step=301,weight_decay=0' \\\n"
    "      --adamw lr=6e-4,step=301,beta2=0.95,weight_decay=0.1\n";

typedef struct arguments {
    cli_saving saving;
    char **files;
    size_t file_count;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->saving;
        return 0;
    case ARGP_KEY_ARG:
        if (cli_take_store(&a->saving.common, arg) ||
            (a->file_count == 0 && cli_saving_take_ref(&a->saving, arg))) {
            return 0;
        }
        if (a->file_count == 1) {
            cli_saving_check_store(&a->saving, a->files[0], arg, state);
        }
        a->files[a->file_count++] = arg;
        return 0;
    case ARGP_KEY_END:
        if (a->file_count == 0) {
            argp_error(state, "name the safetensors FILEs to save");
        }
        cli_saving_check_standard_input(&a->saving, a->files, a->file_count, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int cmd_save(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_saving_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {0, parse, "[STORE] [RUN@STEP] FILE.safetensors...", doc, children, 0, 0};
    arguments a = {.saving = CLI_SAVING_INIT("save")};
    a.files = calloc((size_t)argc, sizeof(*a.files));
    ckd_error err;
    if (!a.files) {
        cli_error_nomem(&err);
        return cli_fail(&err);
    }
    cli_parse_arguments(&argp, argc, argv, &a);
    cli_inputs inputs;
    ckd_status status = cli_inputs_open(&inputs, a.files, a.file_count, &a.saving.roles, &err);
    THEN(status, cli_saving_order(&a.saving, &inputs, &err));
    int code = status == CKD_OK ? cli_saving_run(&a.saving, &inputs) : cli_fail(&err);
    cli_inputs_close(&inputs);
    cli_saving_free(&a.saving);
    free(a.files);
    return code;
}

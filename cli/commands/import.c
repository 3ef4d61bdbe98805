/* ckptdelta import: many ranks' files -> one checkpoint. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/convert/convert.h"
#include "cli/commands/save_options.h"

enum { OPT_LAYOUT = 0x300 };

static const struct argp_option options_table[] = {
    {"layout", OPT_LAYOUT, "FILE", 0, "What the ranks' tensors are (required); docs/layouts.md describes it",
     1},
    {"dry-run", 'n', 0, 0,
     "Save nothing: read the files' headers, check that all fits together, and print what each tensor becomes",
     1},
    {0},
};

static const char doc[] =
    "Save the safetensors files of all ranks of a parallel training (tensor, pipeline, expert and data parallel) as the "
    "checkpoint of step N of a run: whole tensors, however they were cut. Later load them for any other number of ranks."
    "\vThe layout is a text: the mesh of ranks, then rules, of which the first that matches a tensor's name counts. FILEs are in "
    "the order of ranks, unless the layout says with `files` how paths name them. Every tensor must match a rule; copies of a tensor on several ranks are compared bit by bit. Nothing is saved if something does not fit; the message says which tensor, ranks and "
    "line of the layout.\n\n"
    "  mesh pp=2 tp=4                  # tp varies fastest: rank = 4 pp + tp\n"
    "  files mp_rank_{tp:2}_{pp:3}.safetensors\n"
    "  number layer over=pp count=24   # a stage calls its layers 0 to 11\n"
    "  embed\\.weight      sharded dim=0 over=tp size=50257 pad=128 pp=0\n"
    "  layers\\.{layer}\\.(qkv|fc1)\\..*  sharded dim=0 over=tp\n"
    "  layers\\.{layer}\\.(proj|fc2)\\.weight  sharded dim=1 over=tp\n"
    "  layers\\.{layer}\\..*  replicated\n"
    "  final_norm\\..*    replicated pp=last\n"
    "  rng_state         skipped\n\n"
    "Rules for X are rules for exp_avg.X, exp_avg_sq.X and master.X, too. Kinds: unique, replicated, averaged, sharded, expert, "
    "flat, skipped. Dimensions may be counted from the last one, dim=-1. For heads of keys and values that several ranks repeat, "
    "for the parts of a fused matrix, and for flat buffers of ZeRO and FSDP1, of which each rank has a range, write:\n\n"
    "  qkv  sharded dim=0 over=tp parts=q:512:64,k:128:64:repeat,v:128:64:repeat\n"
    "  list decay embed.weight:50257x768   # before the rules: what is in it\n"
    "  group0  flat of=decay over=dp pad=2\n\n"
    "docs/layouts.md has the whole language with examples. The other options are those of save.\n\n"
    "Examples:\n"
    "  ckptdelta import ckpts --layout tp4pp2 --dry-run step100/*.safetensors\n"
    "  ckptdelta import ckpts --layout tp4pp2 --run gpt --step 100 step100/*\n"
    "  ckptdelta load ckpts --layout tp2 --shard 1/2 --out rank1.safetensors\n"
    "  ckptdelta load ckpts --layout tp2 --out all_ranks/\n";

typedef struct arguments {
    cli_saving saving;
    const char *layout;
    bool dry_run;
    char **files;
    size_t file_count;
} arguments;

static void check_complete(const arguments *a, struct argp_state *state) {
    if (a->saving.common.store && !a->layout) {
        argp_error(
            state,
            "--layout names the FILE that says what the ranks' tensors are; checkpoints of PyTorch and transformers need "
            "none: `python -m ckptdelta import` of the Python package reads them");
    }
    if (a->saving.common.store && a->file_count == 0) {
        argp_error(state, "name the safetensors FILEs of all ranks");
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->saving;
        return 0;
    case OPT_LAYOUT:
        a->layout = arg;
        return 0;
    case 'n':
        a->dry_run = a->saving.saves_nothing = true;
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
        check_complete(a, state);
        cli_saving_check_standard_input(&a->saving, a->files, a->file_count, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- saving ---- */

/* A tensor of the plan, as a source for the save. */
typedef struct source {
    import_reader *reader;
    const import_tensor *tensor;
} source;

static ckd_status read_source(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    const source *s = context;
    return import_read(s->reader, s->tensor, first, count, to, err);
}

static ckd_status fill_inputs(cli_inputs *inputs, source *sources, const import_plan *plan, cli_roles *roles,
                              import_reader *reader, ckd_error *err) {
    for (size_t i = 0; i < plan->count; i++) {
        sources[i] = (source){reader, &plan->tensors[i]};
        inputs->tensors[inputs->count++] =
            (cli_input){.tensor = &plan->tensors[i].tensor, .read = read_source, .context = &sources[i]};
    }
    inputs->files = plan->files;
    inputs->file_count = plan->file_count;
    inputs->metadata = plan->metadata;
    inputs->bytes = plan->bytes;
    return cli_inputs_set_roles(inputs, roles, err);
}

static int save_plan(arguments *a, const import_plan *plan) {
    ckd_error err;
    cli_inputs inputs = {.tensors = calloc(plan->count + 1, sizeof(*inputs.tensors))};
    source *sources = calloc(plan->count + 1, sizeof(*sources));
    import_reader *reader = NULL;
    ckd_status status =
        inputs.tensors && sources ? import_reader_new(&reader, plan, &err) : cli_error_nomem(&err);
    THEN(status, fill_inputs(&inputs, sources, plan, &a->saving.roles, reader, &err));
    THEN(status, cli_saving_order(&a->saving, &inputs, &err));
    int code = status == CKD_OK ? cli_saving_run(&a->saving, &inputs) : cli_fail(&err);
    import_reader_free(reader);
    free(sources);
    free(inputs.tensors);
    return code;
}

static int run(arguments *a) {
    ckd_error err;
    layout *l;
    import_plan plan = {0};
    ckd_status status = layout_read(&l, a->layout, &err);
    THEN(status, import_plan_make(&plan, l, a->files, a->file_count, &err));
    if (status == CKD_OK && !a->saving.common.quiet) {
        import_report_remarks(&plan);
    }
    if (status == CKD_OK && a->dry_run) {
        status = import_report_plan(&plan, &a->saving.common, &a->saving.roles, &err);
    }
    int code = status != CKD_OK ? cli_fail(&err) : a->dry_run ? CLI_DONE : save_plan(a, &plan);
    import_plan_free(&plan);
    layout_release(l);
    return code;
}

int cmd_import(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_saving_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {
        options_table, parse, "[STORE] [RUN@STEP] FILE.safetensors...", doc, children, 0, 0};
    arguments a = {.saving = CLI_SAVING_INIT("import")};
    a.files = calloc((size_t)argc, sizeof(*a.files));
    if (!a.files) {
        ckd_error err;
        cli_error_nomem(&err);
        return cli_fail(&err);
    }
    cli_parse_arguments(&argp, argc, argv, &a);
    int code = run(&a);
    cli_saving_free(&a.saving);
    free(a.files);
    return code;
}

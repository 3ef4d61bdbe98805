/* ckptdelta export: one checkpoint -> a folder of safetensors files in the form that model hubs and loaders use. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/convert/convert.h"
#include "cli/output/output.h"
#include "cli/files/files.h"

enum { OPT_SHARD_SIZE = 0x200, OPT_ONLY, OPT_MATCH, OPT_DTYPE, OPT_OVERWRITE };

static const struct argp_option options_table[] = {
    {"out", 'o', "DIR", 0, "The folder to write (required); it is written completely or not at all", 2},
    {"overwrite", OPT_OVERWRITE, 0, 0,
     "Replace DIR if it contains only what an export writes; the old one stays until the new one is complete",
     2},
    {"max-shard-size", OPT_SHARD_SIZE, "SIZE", 0,
     "Largest size of a file, such as 500M; a larger tensor gets a file of its own [default: 5G]", 2},
    {"only", OPT_ONLY, "ROLE,...", 0,
     "Only tensors with these roles: weight, exp_avg, exp_avg_sq, master, other; no blobs", 3},
    {"match", OPT_MATCH, "REGEX", 0,
     "Only tensors in whose names this extended regular expression is found; no blobs. May be given several times",
     3},
    {"dtype", OPT_DTYPE, "DTYPE", 0,
     "Round floats with the roles weight and master to bf16, f16 or f32 [default: as stored, bit for bit]",
     3},
    {"dry-run", 'n', 0, 0, "Write nothing; show what would be written, with exact sizes", 4},
    {0},
};

static const char doc[] =
    "Write a checkpoint as a folder that other programs read as a model: model.safetensors; or, if that would be larger than "
    "--max-shard-size, model-00001-of-0000N.safetensors and so on, and model.safetensors.index.json, which says where each tensor is. "
    "Every value is verified. Without --run: the only run; without --step: the newest checkpoint."
    "\vEach file has the metadata of the saved files, or format=pt if they had none. Blobs (a configuration, a data loader's position) are written to DIR/blobs/NAME; characters other than letters, digits and . _ - become %XX.\n"
    "Optimizer state is exported like everything else; --only weight leaves it out.\n"
    "The Python package exports to .pt, to PyTorch's DCP and to DeepSpeed's universal form (Store.export_checkpoint), and writes a folder that from_pretrained reads, with configuration and tokenizer (Store.export_hf).\n"
    "\n"
    "Examples:\n"
    "  ckptdelta export ckpts --run gpt --step 1000 --out gpt-1000\n"
    "  ckptdelta export ckpts --only weight --dtype bf16 --out gpt-bf16\n"
    "  ckptdelta export ckpts --match '^layers\\.[0-3]\\.' --out first-four\n"
    "  ckptdelta export ckpts --max-shard-size 1G --dry-run --out big\n";

typedef struct arguments {
    cli_options common;
    cli_pick pick;
    const char *out;
    export_choice choice;
    bool overwrite, dry_run;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    ckd_error err;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->child_inputs[1] = &a->common;
        state->child_inputs[2] = &a->pick;
        state->child_inputs[3] = &a->common;
        return 0;
    case 'o':
        if (strcmp(arg, "-") == 0) {
            argp_error(state, "--out names a folder; ckptdelta load -o - writes a file to standard output");
        }
        a->out = arg;
        return 0;
    case OPT_SHARD_SIZE:
        if (!cli_parse_size(&a->choice.max, arg) || a->choice.max == 0) {
            argp_error(state, "--max-shard-size is a size such as 500M or 5G, not '%s'", arg);
        }
        return 0;
    case OPT_ONLY:
        cli_check_value(state, export_choice_roles(&a->choice, arg, &err), &err);
        return 0;
    case OPT_MATCH:
        cli_check_value(state, export_choice_match(&a->choice, arg, &err), &err);
        return 0;
    case OPT_DTYPE:
        cli_check_value(state, export_choice_dtype(&a->choice, arg, &err), &err);
        return 0;
    case OPT_OVERWRITE:
        a->overwrite = true;
        return 0;
    case 'n':
        a->dry_run = true;
        return 0;
    case ARGP_KEY_END:
        if (!a->out) {
            argp_error(state, "--out names the DIR to write");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- writing ---- */

static ckd_status write_blob(const char *path, const export_file *f, ckd_load *load, ckd_error *err) {
    void *data;
    size_t size;
    ckd_status status = ckd_load_blob(&data, &size, load, f->blob, err);
    THEN(status, cli_output_bytes(path, false, data, size, NULL, err));
    ckd_blob_free(data);
    return status;
}

static ckd_status write_file(file_writing *w, const cli_folder *folder, const export_plan *p,
                             const export_file *f, ckd_error *err) {
    char *path = cli_folder_inside(folder, f->name, err);
    if (!path) {
        return err->status;
    }
    bool index = p->index && f == &p->files[p->count - 1];
    ckd_status status = f->blob ? write_blob(path, f, w->load, err)
                        : index ? cli_output_bytes(path, false, p->index, (size_t)f->bytes, NULL, err)
                                : file_content_write(w, &f->content, path, false, NULL, err);
    free(path);
    return status;
}

static ckd_status write_all(const arguments *a, const export_plan *p, ckd_load *load, ckd_error *err) {
    file_writing writing;
    cli_folder *folder = NULL;
    ckd_status status = file_writing_begin(&writing, load, "exporting", p->tensor_bytes, &a->common, err);
    THEN(status, cli_folder_open(&folder, a->out, a->overwrite ? export_replaceable : NULL, p->bytes, err));
    for (size_t i = 0; i < p->count && status == CKD_OK; i++) {
        status = write_file(&writing, folder, p, &p->files[i], err);
    }
    if (status == CKD_OK) {
        status = cli_folder_commit(folder, err);
    } else {
        cli_folder_drop(folder);
    }
    file_writing_end(&writing);
    return status;
}

/* ---- reporting ---- */

static ckd_status print_json(const arguments *a, const export_plan *p, ckd_store *store, const ckd_load *load,
                             ckd_error *err) {
    json_t *checkpoint = cli_json_checkpoint_of(ckd_load_checkpoint(load), store);
    json_t *files = json_array();
    for (size_t i = 0; i < p->count; i++) {
        const export_file *f = &p->files[i];
        cli_json_append(&files, json_pack("{s:o, s:I, s:I, s:o}", "name", cli_json_text(f->name),
                                          "tensor_count", (json_int_t)f->tensors, "bytes",
                                          (json_int_t)f->bytes, "blob", cli_json_text(f->blob)));
    }
    return cli_json_print(
        json_pack("{s:i, s:b, s:[o], s:o, s:I, s:I, s:I, s:I, s:I, s:o}", "schema", 1, "dry_run", a->dry_run,
                  "checkpoints", checkpoint, "out", cli_json_text(a->out), "tensor_count",
                  (json_int_t)p->tensors, "left_out", (json_int_t)p->left_out, "rounded", (json_int_t)p->cast,
                  "tensor_bytes", (json_int_t)p->tensor_bytes, "bytes", (json_int_t)p->bytes, "files", files),
        err);
}

static ckd_status print_files(const export_plan *p, ckd_error *err) {
    cli_table *t = cli_table_new("FILE|>TENSORS|>BYTES|>SIZE");
    for (size_t i = 0; i < p->count; i++) {
        cli_table_cell(t, "%s", p->files[i].name);
        cli_table_cell(t, p->files[i].tensors ? "%zu" : "-", p->files[i].tensors);
        cli_table_cell(t, "%" PRIu64, p->files[i].bytes);
        cli_table_cell(t, "%s", cli_text_size(p->files[i].bytes).text);
    }
    return cli_table_print(t, err);
}

static ckd_status print_text(const arguments *a, const export_plan *p, const ckd_load *load, ckd_error *err) {
    ckd_status status = a->dry_run || a->common.verbose ? print_files(p, err) : CKD_OK;
    printf("%s %s into ", a->dry_run ? "would export" : "exported",
           cli_ref_text_of(ckd_load_checkpoint(load)).text);
    cli_print_clean(stdout, a->out);
    printf(": %zu tensor%s in %zu file%s, %" PRIu64 " bytes (%s)\n", p->tensors, cli_plural(p->tensors),
           p->count, cli_plural(p->count), p->bytes, cli_text_size(p->bytes).text);
    if (p->cast) {
        printf("%zu of them rounded to %s\n", p->cast, ckd_dtype_name(a->choice.dtype));
    }
    if (p->left_out) {
        printf("%zu tensor%s left out\n", p->left_out, cli_plural(p->left_out));
    }
    return status;
}

static ckd_status print_result(const arguments *a, const export_plan *p, ckd_store *store,
                               const ckd_load *load, ckd_error *err) {
    if (a->common.json) {
        return print_json(a, p, store, load, err);
    }
    return cli_prints_text(&a->common) ? print_text(a, p, load, err) : CKD_OK;
}

/* ---- the command ---- */

static ckd_status export_checkpoint(const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_checkpoint from;
    ckd_load *load = NULL;
    export_plan plan = {0};
    ckd_status status = cli_find_healthy(&from, store, &a->pick, err);
    THEN(status, cli_load_begin(&load, store, &from.id, &a->common, err));
    THEN(status, export_plan_make(&plan, &a->choice, load, err));
    if (status == CKD_OK && !a->dry_run) {
        status = write_all(a, &plan, load, err);
        if (status == CKD_OK) {
            cli_committed("%s is exported", cli_ref_text_of(&from).text);
        }
    }
    THEN(status, print_result(a, &plan, store, load, err));
    export_plan_free(&plan);
    ckd_load_end(load);
    return status;
}

static int run(const arguments *a) {
    ckd_error err;
    ckd_store *store = NULL;
    ckd_status status = cli_output_check_outside(a->out, a->common.store, &err);
    THEN(status, cli_folder_check(a->out, a->overwrite ? export_replaceable : NULL, &err));
    THEN(status, cli_open_store(&store, &a->common, CKD_OPEN_READ, &err));
    THEN(status, export_checkpoint(a, store, &err));
    ckd_store_close(store);
    return status == CKD_OK ? CLI_DONE : cli_fail_with_hint(&err, &a->common);
}

int cmd_export(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0},
                                                 {&cli_threads_argp, 0, 0, 0},
                                                 {&cli_pick_argp, 0, 0, 0},
                                                 {&cli_staging_argp, 0, 0, 0},
                                                 {0}};
    static const struct argp argp = {options_table, parse, CLI_PICK_USAGE, doc, children, 0, 0};
    arguments a = {.common.command = "export", .choice.max = UINT64_C(5) << 30};
    cli_parse_arguments(&argp, argc, argv, &a);
    int code = run(&a);
    export_choice_free(&a.choice);
    return code;
}

/* ckptdelta load: one checkpoint -> a safetensors file. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/commands/explain.h"
#include "cli/output/output.h"
#include "cli/commands/load_choice.h"
#include "cli/files/files.h"

enum {
    OPT_TENSOR = 0x200,
    OPT_FORCE,
    OPT_SHARD,
    OPT_DIM,
    OPT_REGION,
    OPT_EXPLAIN,
    OPT_LAYOUT,
    OPT_OLDER,
    OPT_BLOB
};

static const struct argp_option options_table[] = {
    {"explain", OPT_EXPLAIN, 0, 0,
     "Load and write nothing: show how much would be read, from how many checkpoints, and how deep the chain is; -v: for each tensor",
     2},
    {"out", 'o', "FILE", 0,
     "The file to write (required, except with --explain or --blob); it is written completely or not at all. -: standard output",
     2},
    {"tensor", OPT_TENSOR, "GLOB", 0, "Only tensors whose names match; may be given several times", 2},
    {"blob", OPT_BLOB, "NAME=FILE", 0,
     "Also write the blob NAME, stored by save --blob or a program, to FILE. -: standard output. Without --out, only blobs are written. May be repeated",
     2},
    {"force", OPT_FORCE, 0, 0, "Replace FILE if it exists", 2},
    {"or-older", OPT_OLDER, 0, 0,
     "If the checkpoint is damaged, load the newest one before it that is not, and say so", 2},
    {"shard", OPT_SHARD, "I/N", 0,
     "Only part I (from 0) of N of every tensor, cut along --dim as torch.chunk cuts, however it was saved; tensors without that "
     "dimension are whole",
     3},
    {"dim", OPT_DIM, "D", 0, "The dimension that --shard cuts; -1 is the last one [default: 0]", 3},
    {"region", OPT_REGION, "NAME=[a:b,c:d]", 0,
     "Only elements a to b - 1 of the first dimension of tensor NAME, c to d - 1 of the second ...; a, b and dimensions at the "
     "end may be left out. May be given for several tensors; chooses them as --tensor does",
     3},
    {"layout", OPT_LAYOUT, "FILE", 0,
     "Write the tensors of rank I, named and cut by the rules in FILE (docs/layouts.md), with --shard I/N. Without --shard: those of all ranks; --out is then a folder with a file for each",
     3},
    {0},
};

static const char doc[] =
    "Write a checkpoint to a safetensors file, every value verified. Without --run: the only run; without --step: the "
    "newest checkpoint."
    "\vExamples:\n"
    "  ckptdelta load ckpts --out newest.safetensors\n"
    "  ckptdelta load ckpts @best -o - | ssh gpu1 'cat > best.safetensors'\n"
    "  ckptdelta load ckpts --run gpt --step 100 --out step100.safetensors\n"
    "  ckptdelta load ckpts --tensor 'layers.0.*' --tensor '*.bias' --out part\n"
    "  ckptdelta load ckpts --shard 0/4 --dim 1 --out rank0.safetensors\n"
    "  ckptdelta load ckpts --region 'embed.weight=[0:1000,:]' --out top\n"
    "  ckptdelta load ckpts --shard 0/4 --dim 1 --explain\n"
    "  ckptdelta load ckpts --layout tp4 --shard 0/4 --out rank0.safetensors\n"
    "  ckptdelta load ckpts --layout tp4 --out all_ranks\n";

typedef struct arguments {
    cli_options common;
    cli_pick pick;
    const char *out;
    bool force, explain, or_older;
    json_t *skipped; /* damaged checkpoints that were skipped: list of {checkpoint, what} */
    const char *layout_path;
    load_choice choice;
    cli_blobs blobs;
    char **rank_paths; /* the files of all ranks, if all are written; the layout says how many */
} arguments;

/* True if every rank of the layout gets a file in the folder --out. */
static bool writes_all_ranks(const arguments *a) {
    return a->layout_path && !a->choice.regions.shards;
}

/* Returns how many outputs go to standard output. */
static size_t standard_outputs(const arguments *a) {
    return (a->out && cli_output_is_standard(a->out)) + cli_blobs_standard(&a->blobs);
}

/* Standard output takes one file and nothing else, and bytes written to it cannot be taken back. */
static void check_standard_output(const arguments *a, struct argp_state *state) {
    if (standard_outputs(a) > 1) {
        argp_error(state,
                   "standard output takes one file; let --out or one --blob be '-', and name the others");
    }
    if (a->common.json) {
        argp_error(state, "--json writes to standard output itself; leave out one of them");
    }
    if (!a->out || !cli_output_is_standard(a->out)) {
        return; /* blobs are written when everything is verified */
    }
    if (writes_all_ranks(a)) {
        argp_error(state, "standard output takes the file of one rank: say --shard I/N");
    }
    if (a->or_older) {
        argp_error(state, "--or-older may have to start over, which standard output cannot; name a file");
    }
}

static void check_blobs(const arguments *a, struct argp_state *state) {
    const load_choice *c = &a->choice;
    if (a->explain) {
        argp_error(state, "--explain is about tensors; leave out --blob");
    }
    if (!a->out && (c->glob_count || c->regions.count || c->regions.shards || a->layout_path)) {
        argp_error(state, "--out names the FILE for tensors; --blob alone writes none");
    }
}

static void check_together(const arguments *a, struct argp_state *state) {
    if (!a->out && !a->explain && !a->blobs.count) {
        argp_error(state, "--out names the FILE to write");
    }
    if (a->blobs.count) {
        check_blobs(a, state);
    }
    if (a->out && a->explain) {
        argp_error(state, "--explain writes nothing; leave out --out");
    }
    if (standard_outputs(a)) {
        check_standard_output(a, state);
    }
    if (a->choice.regions.dim_given && !a->choice.regions.shards) {
        argp_error(state, "--dim says what --shard cuts; give both");
    }
    if (a->layout_path && (a->choice.regions.dim_given || a->choice.regions.count)) {
        argp_error(state, "--layout says what ranks hold; leave out --dim and --region");
    }
    if (writes_all_ranks(a) && a->explain) {
        argp_error(state, "--explain is for one rank: say --shard I/N");
    }
}

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
        a->out = arg;
        return 0;
    case OPT_TENSOR:
        a->choice.globs[a->choice.glob_count++] = arg;
        return 0;
    case OPT_FORCE:
        a->force = true;
        return 0;
    case OPT_EXPLAIN:
        a->explain = true;
        return 0;
    case OPT_BLOB:
        cli_check_value(state, cli_blobs_add(&a->blobs, arg, &err), &err);
        return 0;
    case OPT_OLDER:
        a->or_older = true;
        return 0;
    case OPT_SHARD:
        cli_check_value(state, cli_regions_set_shard(&a->choice.regions, arg, &err), &err);
        return 0;
    case OPT_DIM:
        cli_check_value(state, cli_regions_set_dim(&a->choice.regions, arg, &err), &err);
        return 0;
    case OPT_REGION:
        cli_check_value(state, cli_regions_add(&a->choice.regions, arg, &err), &err);
        return 0;
    case OPT_LAYOUT:
        a->layout_path = arg;
        return 0;
    case ARGP_KEY_END:
        check_together(a, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static ckd_status write_content(const arguments *a, const char *out, const file_content *c, ckd_load *load,
                                cli_outputs *set, ckd_error *err) {
    file_writing writing;
    ckd_status status = file_writing_begin(&writing, load, "loading", c->data_size, &a->common, err);
    THEN(status, file_content_write(&writing, c, out, a->force, set, err));
    file_writing_end(&writing);
    return status;
}

/* Totals of the written data over all ranks. */
typedef struct written {
    size_t tensors, files;
    uint64_t bytes, data_bytes;
} written;

static void count_written(written *w, const file_content *c) {
    w->tensors += c->count;
    w->files++;
    w->bytes += c->header_size + c->data_size;
    w->data_bytes += c->data_size;
}

/* If a file goes to standard output, text must not be mixed into it. */
static bool talks(const arguments *a) {
    return cli_prints_text(&a->common) && !standard_outputs(a);
}

static ckd_status print_result(const arguments *a, const written *w, ckd_store *store, const ckd_load *load,
                               ckd_error *err) {
    const ckd_checkpoint *from = ckd_load_checkpoint(load);
    if (a->common.json) {
        json_t *checkpoint = cli_json_checkpoint_of(from, store);
        return cli_json_print(json_pack("{s:i, s:[o], s:o, s:I, s:I, s:O}", "schema", 1, "checkpoints",
                                        checkpoint, "out", cli_json_text(a->out), "tensor_count",
                                        (json_int_t)w->tensors, "bytes", (json_int_t)w->bytes, "skipped",
                                        a->skipped),
                              err);
    }
    if (talks(a)) {
        if (a->blobs.count) {
            printf("loaded %zu blob%s of %s\n", a->blobs.count, cli_plural(a->blobs.count),
                   cli_ref_text_of(from).text);
        }
        if (!a->out) {
            return CKD_OK;
        }
        printf("loaded %s into ", cli_ref_text_of(from).text);
        cli_print_clean(stdout, a->out);
        if (writes_all_ranks(a)) {
            printf(": %zu file%s,", w->files, cli_plural(w->files));
        } else {
            putchar(':');
        }
        printf(" %zu tensor%s, %s\n", w->tensors, cli_plural(w->tensors), cli_text_size(w->data_bytes).text);
    }
    return CKD_OK;
}

static void list_names(const arguments *a, const file_content *c) {
    for (size_t i = 0; i < c->count && a->common.verbose && talks(a); i++) {
        fputs("  ", stdout);
        cli_print_clean(stdout, c->tensors[i].name);
        putchar('\n');
    }
}

static ckd_status explain(const arguments *a, const file_content *c, ckd_store *store, ckd_load *load,
                          ckd_error *err) {
    ckd_load_request *requests = NULL;
    size_t count = 0;
    ckd_status status = load_choice_requests(&requests, &count, c, err);
    THEN(status, cli_explain(load, store, requests, count, &a->common, err));
    free(requests);
    return status;
}

/* ---- files ---- */

/* Writes the blobs beside the tensors' files in `set`. Then all get their names, or none does. */
static ckd_status publish(arguments *a, ckd_status status, cli_outputs *set, const ckd_load *load,
                          ckd_error *err) {
    THEN(status, cli_blobs_write(&a->blobs, a->force, set, err));
    if (status != CKD_OK) {
        cli_outputs_drop(set);
        return status;
    }
    status = cli_outputs_publish(set, err);
    if (status == CKD_OK) {
        cli_committed("%s is loaded", cli_ref_text_of(ckd_load_checkpoint(load)).text);
    }
    return status;
}

static ckd_status load_one(arguments *a, ckd_store *store, ckd_load *load, const bound_checkpoint *b,
                           ckd_error *err) {
    file_content c = {0};
    written w = {0};
    cli_outputs outputs = {0};
    ckd_status status = load_choice_make(&c, &a->choice, load, b, (uint32_t)a->choice.regions.shard, err);
    if (status == CKD_OK && a->explain) {
        status = explain(a, &c, store, load, err);
    } else if (status == CKD_OK) {
        status = write_content(a, a->out, &c, load, &outputs, err);
        status = publish(a, status, &outputs, load, err);
        count_written(&w, &c);
        THEN(status, print_result(a, &w, store, load, err));
        if (status == CKD_OK) {
            list_names(a, &c);
        }
    }
    file_content_free(&c);
    return status;
}

static ckd_status load_all_ranks(arguments *a, ckd_store *store, ckd_load *load, const bound_checkpoint *b,
                                 ckd_error *err) {
    written w = {0};
    cli_outputs outputs = {0};
    ckd_status status = CKD_OK;
    for (uint32_t rank = 0; rank < a->choice.layout->world && status == CKD_OK; rank++) {
        file_content c = {0};
        const char *path = a->rank_paths[rank];
        status = load_choice_make(&c, &a->choice, load, b, rank, err);
        THEN(status, cli_output_make_folders(path, err));
        THEN(status, write_content(a, path, &c, load, &outputs, err));
        count_written(&w, &c);
        file_content_free(&c);
    }
    status = publish(a, status, &outputs, load, err);
    return status == CKD_OK ? print_result(a, &w, store, load, err) : status;
}

/* Loads blobs only: there is no --out. */
static ckd_status load_blobs(arguments *a, ckd_store *store, ckd_load *load, ckd_error *err) {
    const written nothing = {0};
    cli_outputs outputs = {0};
    ckd_status status = publish(a, CKD_OK, &outputs, load, err);
    return status == CKD_OK ? print_result(a, &nothing, store, load, err) : status;
}

static ckd_status load_checkpoint(arguments *a, ckd_store *store, const ckd_checkpoint *from,
                                  ckd_error *err) {
    ckd_load *load = NULL;
    bound_checkpoint bound = {0};
    ckd_status status = cli_load_begin(&load, store, &from->id, &a->common, err);
    if (status == CKD_OK && a->choice.layout) {
        status = bound_checkpoint_make(&bound, a->choice.layout, ckd_load_tensors(load), err);
    }
    THEN(status, cli_blobs_load(&a->blobs, load, err));
    THEN(status, !a->out && !a->explain ? load_blobs(a, store, load, err)
                 : writes_all_ranks(a)  ? load_all_ranks(a, store, load, &bound, err)
                                        : load_one(a, store, load, &bound, err));
    bound_checkpoint_free(&bound);
    ckd_load_end(load);
    return status;
}

/* ---- falling back to older checkpoints after damage, if requested ---- */

static void skip(arguments *a, const char *ref, const ckd_error *why) {
    cli_note("%s is damaged and skipped: %s%s%s%s", ref, why->message, why->file[0] ? " (file " : "",
             why->file, why->file[0] ? ")" : "");
    cli_json_append(&a->skipped,
                    json_pack("{s:s, s:o}", "checkpoint", ref, "what", cli_json_text(why->message)));
}

/* With --or-older, a newer checkpoint that cannot be read is skipped. */
static ckd_status skip_newer(arguments *a, ckd_status status, const ckd_error *err) {
    if (status == CKD_OK || !a->or_older || !ckd_error_is_damage(err)) {
        return status;
    }
    char ref[CKD_RUN_MAX + 24];
    snprintf(ref, sizeof(ref), "%.*s", (int)strcspn(err->message, " "), err->message);
    skip(a, ref, err);
    return CKD_OK;
}

/* For `latest`: is there a newer checkpoint that cannot be read? The error's file names it. */
static ckd_status check_newest(arguments *a, ckd_store *store, const ckd_checkpoint *found, ckd_error *err) {
    return cli_pick_is_latest(&a->pick) ? skip_newer(a, ckd_store_check_newest(store, found, err), err)
                                        : CKD_OK;
}

/* A failure to write an output is no damage to the checkpoint. */
static bool is_damaged(const arguments *a, const ckd_error *err) {
    return ckd_error_is_damage(err) &&
           (err->status == CKD_E_CORRUPT || cli_error_in_store(err, &a->common) > 0);
}

static ckd_status load_to_file(arguments *a, ckd_store *store, ckd_error *err) {
    ckd_checkpoint from;
    ckd_status status;
    do { /* repeated on EXISTS: a newer one was committed meanwhile */
        status = cli_find_pick(&from, store, &a->pick, err);
        THEN(status, check_newest(a, store, &from, err));
    } while (status == CKD_E_EXISTS);
    if (status == CKD_OK && cli_pick_is_latest(&a->pick)) {
        status = skip_newer(a, ckd_store_healthy(&from, store, &from, err), err);
    }
    if (status != CKD_OK) {
        return status;
    }
    for (;;) {
        ckd_checkpoint older;
        status = load_checkpoint(a, store, &from, err);
        if (status == CKD_OK || !a->or_older || !is_damaged(a, err)) {
            return status;
        }
        skip(a, cli_ref_text_of(&from).text, err);
        if (ckd_store_previous(&older, store, from.run, from.step, NULL) != CKD_OK) {
            return status; /* the last checkpoint's error */
        }
        from = older;
    }
}

/* Reads the layout, and checks that it has as many ranks as --shard says. */
static ckd_status read_layout(arguments *a, ckd_error *err) {
    ckd_status status = a->layout_path ? layout_read(&a->choice.layout, a->layout_path, err) : CKD_OK;
    if (status == CKD_OK && a->choice.layout && a->choice.regions.shards &&
        a->choice.regions.shards != a->choice.layout->world) {
        status = layout_error(a->choice.layout, 0, err, CKD_E_INVALID,
                              "the mesh has %u ranks, --shard says %" PRIu64, a->choice.layout->world,
                              a->choice.regions.shards);
    }
    return status;
}

static ckd_status find_rank_paths(arguments *a, ckd_error *err) {
    uint32_t world = a->choice.layout->world;
    a->rank_paths = calloc(world, sizeof(*a->rank_paths));
    for (uint32_t rank = 0; a->rank_paths && rank < world; rank++) {
        char *inside = layout_path_of_rank(a->choice.layout, rank);
        int length = inside ? asprintf(&a->rank_paths[rank], "%s/%s", a->out, inside) : -1;
        free(inside);
        if (length < 0) {
            a->rank_paths[rank] = NULL;
            return cli_error_nomem(err);
        }
    }
    return a->rank_paths ? CKD_OK : cli_error_nomem(err);
}

/* Checks that every file can be written, and that none replaces another one, the layout, or a file of the store. */
static ckd_status check_outputs(const arguments *a, ckd_error *err) {
    size_t ranks = a->rank_paths ? a->choice.layout->world : 0, count = 0;
    const char **paths = calloc(ranks + a->blobs.count + 2, sizeof(*paths));
    if (!paths) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < ranks; i++) {
        paths[count++] = a->rank_paths[i];
    }
    if (a->out && !a->rank_paths) {
        paths[count++] = a->out;
    }
    for (size_t i = 0; i < a->blobs.count; i++) {
        paths[count++] = a->blobs.items[i].path;
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = cli_output_check_outside(paths[i], a->common.store, err);
        THEN(status, cli_output_check(paths[i], a->force, err));
    }
    if (a->layout_path) {
        paths[count++] = a->layout_path;
    }
    THEN(status, cli_outputs_check_distinct(paths, count, err));
    free(paths);
    return status;
}

static void free_rank_paths(const arguments *a) {
    for (uint32_t rank = 0; a->rank_paths && rank < a->choice.layout->world; rank++) {
        free(a->rank_paths[rank]);
    }
    free(a->rank_paths);
}

static int run(arguments *a) {
    ckd_error err;
    ckd_store *store = NULL;
    ckd_status status = read_layout(a, &err);
    if (status == CKD_OK && writes_all_ranks(a)) {
        status = find_rank_paths(a, &err);
    }
    THEN(status, check_outputs(a, &err));
    THEN(status, cli_open_store(&store, &a->common, CKD_OPEN_READ, &err));
    THEN(status, load_to_file(a, store, &err));
    ckd_store_close(store);
    free_rank_paths(a);
    layout_release(a->choice.layout);
    return status == CKD_OK ? CLI_DONE : cli_fail_with_hint(&err, &a->common);
}

int cmd_load(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0},
                                                 {&cli_threads_argp, 0, 0, 0},
                                                 {&cli_pick_argp, 0, 0, 0},
                                                 {&cli_staging_argp, 0, 0, 0},
                                                 {0}};
    static const struct argp argp = {options_table, parse, CLI_PICK_USAGE, doc, children, 0, 0};
    arguments a = {.common.command = "load",
                   .skipped = json_array(),
                   .choice.globs = calloc((size_t)argc, sizeof(char *))};
    if (!a.choice.globs || !a.skipped) {
        ckd_error err;
        cli_error_nomem(&err);
        json_decref(a.skipped);
        free(a.choice.globs);
        return cli_fail(&err);
    }
    cli_parse_arguments(&argp, argc, argv, &a);
    int code = run(&a);
    cli_regions_free(&a.choice.regions);
    cli_blobs_free(&a.blobs);
    json_decref(a.skipped);
    free(a.choice.globs);
    return code;
}

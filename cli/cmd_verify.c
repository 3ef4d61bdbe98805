/* ckptdelta verify: every hash, down to the reconstructed values; what is damaged, and what is still intact. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/commands.h"
#include "cli/json_out.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/text.h"

enum { OPT_QUICK = 0x200, OPT_SAMPLE, OPT_SEED };

static const struct argp_option options_table[] = {
    {"quick", OPT_QUICK, 0, 0, "Only structure and checksums of what is stored; decode nothing", 2},
    {"sample", OPT_SAMPLE, "P", 0,
     "Decode only about P percent of the blocks, such as 1 or 0.5; the rest is checked as with --quick", 2},
    {"seed", OPT_SEED, "N", 0,
     "With --sample: which blocks (another time, others); the output says the number", 2},
    {0},
};

static const char doc[] =
    "Check every hash of a store, down to the reconstructed values of every tensor: of all runs, of one run, or of one "
    "checkpoint with all it depends on. Exit status 4 if anything is damaged; each damage is told with the checkpoints that "
    "cannot be loaded because of it, and for each run the newest checkpoint that is intact."
    "\vExamples:\n"
    "  ckptdelta verify ckpts\n"
    "  ckptdelta verify ckpts --run gpt --step latest\n"
    "  ckptdelta verify ckpts --quick --json\n"
    "  ckptdelta verify ckpts --sample 5\n";

typedef struct arguments {
    cli_options common;
    cli_pick pick;
    bool quick, seed_given;
    double percent; /* 0: all */
    uint64_t seed;
} arguments;

/* Another one each time; below 2^53, so that every JSON reader takes it as it is. */
static uint64_t new_seed(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return ((uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000) & ((UINT64_C(1) << 53) - 1);
}

static void check_sample(arguments *a, struct argp_state *state) {
    if (a->quick && a->percent > 0) {
        argp_error(state, "--quick decodes nothing, --sample some; choose one");
    }
    if (a->seed_given && !(a->percent > 0)) {
        argp_error(state, "--seed goes with --sample");
    }
    if (!a->seed_given) {
        a->seed = new_seed();
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->child_inputs[1] = &a->common;
        state->child_inputs[2] = &a->pick;
        return 0;
    case OPT_QUICK:
        a->quick = true;
        return 0;
    case OPT_SAMPLE:
        if (!cli_parse_double(&a->percent, arg) || !(a->percent > 0) || !(a->percent < 100)) {
            argp_error(state, "--sample is a number of percent above 0 and below 100, not '%s'", arg);
        }
        return 0;
    case OPT_SEED:
        if (!cli_parse_u64(&a->seed, arg) || a->seed > INT64_MAX) {
            argp_error(state, "--seed is a number, not '%s'", arg);
        }
        a->seed_given = true;
        return 0;
    case ARGP_KEY_END:
        check_sample(a, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* What is left of the runs that have damage. A lost checkpoint may have fallen out of the catalog, too. */
typedef struct survivors {
    const char **lost; /* "RUN@STEP" of what cannot be loaded, sorted, each once; they belong to the result */
    size_t lost_count;
    /* The newest that is intact, of each run with damage, by name; they belong to the list. */
    const ckd_checkpoint **newest;
    size_t count;
} survivors;

static int by_text(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static ckd_status collect_lost(survivors *out, const ckd_verify_result *r, ckd_error *err) {
    size_t total = 0, count = 0;
    for (size_t i = 0; i < r->damage_count; i++) {
        total += r->damage[i].checkpoint_count;
    }
    out->lost = calloc(total ? total : 1, sizeof(*out->lost));
    if (!out->lost) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < r->damage_count; i++) {
        for (size_t j = 0; j < r->damage[i].checkpoint_count; j++) {
            out->lost[count++] = r->damage[i].checkpoints[j];
        }
    }
    qsort(out->lost, count, sizeof(*out->lost), by_text);
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || strcmp(out->lost[i], out->lost[i - 1]) != 0) {
            out->lost[out->lost_count++] = out->lost[i];
        }
    }
    return CKD_OK;
}

static bool has_damage(const survivors *left, const char *run) {
    size_t length = strlen(run);
    for (size_t i = 0; i < left->lost_count; i++) {
        if (strncmp(left->lost[i], run, length) == 0 && left->lost[i][length] == '@') {
            return true;
        }
    }
    return false;
}

/* Looks at the checkpoints of one run, from `begin` of the list on; returns where the next run begins. */
static size_t find_newest(survivors *left, const ckd_checkpoint_list *all, size_t begin) {
    const char *run = all->items[begin].run;
    const ckd_checkpoint *newest = NULL;
    size_t end = begin;
    for (; end < all->count && strcmp(all->items[end].run, run) == 0; end++) {
        cli_place_text place = cli_place_of(&all->items[end]);
        const char *name = place.text;
        if (!bsearch(&name, left->lost, left->lost_count, sizeof(*left->lost), by_text)) {
            newest = &all->items[end];
        }
    }
    if (newest && has_damage(left, run)) {
        left->newest[left->count++] = newest;
    }
    return end;
}

static ckd_status find_survivors(survivors *out, const ckd_verify_result *r, const ckd_checkpoint_list *all,
                                 ckd_error *err) {
    *out = (survivors){.newest = calloc(all->count ? all->count : 1, sizeof(*out->newest))};
    if (!out->newest) {
        return cli_error_nomem(err);
    }
    ckd_status status = collect_lost(out, r, err);
    for (size_t i = 0; i < all->count && status == CKD_OK;) {
        i = find_newest(out, all, i);
    }
    return status;
}

/* -------------------------------------------------------------------------------------------------------- JSON */

static json_t *json_number(uint64_t number) {
    return number == CKD_NO_OFFSET ? json_null() : json_integer((json_int_t)number);
}

static json_t *json_damage(const ckd_damage *d) {
    json_t *checkpoints = json_array();
    for (size_t i = 0; i < d->checkpoint_count; i++) {
        cli_json_append(&checkpoints, cli_json_text(d->checkpoints[i]));
    }
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "file", cli_json_text(d->file), "tensor",
                     d->tensor[0] ? cli_json_text(d->tensor) : json_null(), "block", json_number(d->block),
                     "offset", json_number(d->offset), "what", cli_json_text(d->what), "checkpoints",
                     checkpoints);
}

static ckd_status print_json(const ckd_verify_result *r, const survivors *left, const arguments *a,
                             ckd_error *err) {
    json_t *damage = json_array(), *newest = json_array();
    for (size_t i = 0; i < r->damage_count; i++) {
        cli_json_append(&damage, json_damage(&r->damage[i]));
    }
    for (size_t i = 0; i < left->count; i++) {
        cli_json_append(&newest, json_string(cli_place_of(left->newest[i]).text));
    }
    bool sampled = a->percent > 0;
    return cli_json_print(json_pack("{s:i, s:b, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o}", "schema", 1,
                                    "ok", r->damage_count == 0, "checkpoints", (json_int_t)r->checkpoints,
                                    "files", (json_int_t)r->files, "blocks", (json_int_t)r->blocks,
                                    "all_blocks", (json_int_t)r->all_blocks, "bytes", (json_int_t)r->bytes,
                                    "sample", sampled ? json_real(a->percent) : json_null(), "seed",
                                    sampled ? json_integer((json_int_t)a->seed) : json_null(), "damage",
                                    damage, "newest_intact", newest),
                          err);
}

/* -------------------------------------------------------------------------------------------------------- text */

static void print_damage(const ckd_damage *d) {
    cli_print_clean(stdout, d->what);
    const char *separator = "\n  at ";
    if (d->file[0]) {
        printf("%sfile ", separator);
        cli_print_clean(stdout, d->file);
        separator = ", ";
    }
    if (d->offset != CKD_NO_OFFSET) {
        printf("%soffset %" PRIu64, separator, d->offset);
        separator = ", ";
    }
    if (d->block != CKD_NO_OFFSET) {
        printf("%srecord %" PRIu64, separator, d->block);
        separator = ", ";
    }
    if (d->tensor[0]) {
        printf("%stensor ", separator);
        cli_print_clean(stdout, d->tensor);
    }
    fputs(d->checkpoint_count ? "\n  cannot be loaded: " : "\n  every checkpoint can be loaded", stdout);
    for (size_t i = 0; i < d->checkpoint_count; i++) {
        printf("%s%s", i ? ", " : "", d->checkpoints[i]);
    }
    putchar('\n');
}

static void print_text(const ckd_verify_result *r, const survivors *left, const arguments *a) {
    for (size_t i = 0; i < r->damage_count; i++) {
        print_damage(&r->damage[i]);
    }
    for (size_t i = 0; i < left->count; i++) {
        printf("the newest intact checkpoint of run %s is step %" PRIu64
               ": ckptdelta load %s --run %s --step %" PRIu64 " --out FILE\n",
               left->newest[i]->run, left->newest[i]->step, a->common.store, left->newest[i]->run,
               left->newest[i]->step);
    }
    if (a->percent > 0 && r->all_blocks) {
        printf("decoded %" PRIu64 " of %" PRIu64 " blocks, %.3g %%, chosen by --seed %" PRIu64
               "; of the others what is stored was checked\n",
               r->blocks, r->all_blocks, 100 * (double)r->blocks / (double)r->all_blocks, a->seed);
    }
    printf("%s %" PRIu64 " checkpoints, %" PRIu64 " files, %" PRIu64 " blocks, %s: %s\n",
           a->quick ? "checked, decoding nothing," : "verified", r->checkpoints, r->files, r->blocks,
           cli_text_size(r->bytes).text, r->damage_count ? "DAMAGED" : "no damage");
}

/* ------------------------------------------------------------------------------------------------------ checking */

static ckd_status verify(ckd_verify_result **out, const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_verify_options options = CKD_VERIFY_OPTIONS_INIT;
    options.run = a->pick.run;
    options.quick = a->quick;
    options.sample = a->percent / 100;
    options.seed = a->seed;
    ckd_checkpoint one;
    if (a->pick.step_given || a->pick.tag) {
        ckd_status status = cli_find_pick(&one, store, &a->pick, err);
        if (status != CKD_OK) {
            return status;
        }
        options.run = one.run;
        options.step = one.step;
        options.one_step = 1;
    }
    cli_progress progress;
    cli_progress_begin(&progress, "verifying", a->common.quiet);
    options.on_progress = cli_progress_update;
    options.progress_context = &progress;
    ckd_status status = ckd_store_verify(out, store, &options, err);
    cli_progress_end(&progress);
    return status;
}

static ckd_status tell(const arguments *a, const ckd_verify_result *result, ckd_store *store,
                       ckd_error *err) {
    ckd_checkpoint_list *all;
    survivors left = {0};
    ckd_status status = ckd_store_list(&all, store, NULL, err);
    if (status == CKD_OK) {
        status = find_survivors(&left, result, all, err);
    }
    if (status == CKD_OK && a->common.json) {
        status = print_json(result, &left, a, err);
    } else if (status == CKD_OK && cli_talks(&a->common)) {
        print_text(result, &left, a);
    }
    if (status == CKD_OK && result->damage_count > 0) {
        status = cli_error(err, CKD_E_CORRUPT, "%zu place%s damaged; %zu checkpoint%s cannot be loaded",
                           result->damage_count, result->damage_count == 1 ? " is" : "s are", left.lost_count,
                           left.lost_count == 1 ? "" : "s");
    }
    free(left.newest);
    free(left.lost);
    ckd_checkpoint_list_free(all);
    return status;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_verify_result *result = NULL;
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_READ, err);
    if (status == CKD_OK) {
        status = verify(&result, a, store, err);
    }
    if (status == CKD_OK) {
        status = tell(a, result, store, err);
    }
    ckd_verify_result_free(result);
    ckd_store_close(store);
    return status;
}

int cmd_verify(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_threads_argp, 0, 0, 0}, {&cli_pick_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "STORE", doc, children, 0, 0};
    arguments a = {.common.command = "verify"};
    argp_parse(&argp, argc, argv, 0, NULL, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}

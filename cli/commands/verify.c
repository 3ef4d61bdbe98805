/*
 * ckptdelta verify: checks every hash, including those of the reconstructed values. Reports the damage, and the
 * checkpoints that are intact.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/commands/commands.h"
#include "cli/commands/damage.h"
#include "cli/output/output.h"

enum { OPT_QUICK = 0x200, OPT_SAMPLE, OPT_SEED };

static const struct argp_option options_table[] = {
    {"quick", OPT_QUICK, 0, 0, "Check only the structure and the stored checksums; decode nothing", 2},
    {"sample", OPT_SAMPLE, "P", 0,
     "Decode only about P percent of the blocks, such as 1 or 0.5; the rest is checked as with --quick", 2},
    {"seed", OPT_SEED, "N", 0,
     "With --sample: chooses the blocks; the output shows the number [default: random]", 2},
    {0},
};

static const char doc[] =
    "Check every hash of a store, down to the reconstructed values of every tensor: of all runs, of one run, or of one "
    "checkpoint with all it depends on. Exit status 4 if anything is damaged; each damage is reported with the checkpoints that cannot be loaded because of it, and for each run its newest intact checkpoint."
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

/* A different seed each time; below 2^53, so that every JSON reader accepts it. */
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

/* -------------------------------------------------------------------------------------------------------- JSON */

static ckd_status print_json(const ckd_verify_result *r, const cli_survivors *left, const arguments *a,
                             ckd_error *err) {
    bool sampled = a->percent > 0;
    return cli_json_print(json_pack("{s:i, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o}", "schema",
                                    1, "ok", r->damage_count == 0, "checkpoints", (json_int_t)r->checkpoints,
                                    "files", (json_int_t)r->files, "blocks", (json_int_t)r->blocks,
                                    "all_blocks", (json_int_t)r->all_blocks, "bytes", (json_int_t)r->bytes,
                                    "weak_groups", (json_int_t)r->weak_groups, "sample",
                                    sampled ? json_real(a->percent) : json_null(), "seed",
                                    sampled ? json_integer((json_int_t)a->seed) : json_null(), "damage",
                                    cli_json_damage(r), "newest_intact", cli_json_newest(left)),
                          err);
}

/* -------------------------------------------------------------------------------------------------------- text */

static void print_text(const ckd_verify_result *r, const cli_survivors *left, const arguments *a) {
    cli_print_damage(r, left, a->common.store);
    if (a->percent > 0 && r->all_blocks) {
        printf("decoded %" PRIu64 " of %" PRIu64 " blocks, %.3g %%, chosen by --seed %" PRIu64
               "; of the others only the stored bytes were checked\n",
               r->blocks, r->all_blocks, 100 * (double)r->blocks / (double)r->all_blocks, a->seed);
    }
    if (r->weak_groups) {
        printf(
            "%" PRIu64
            " parity groups have lost files, so fewer losses can be repaired: see ckptdelta parity %s --status\n",
            r->weak_groups, a->common.store);
    }
    printf("%s %" PRIu64 " checkpoint%s, %" PRIu64 " file%s, %" PRIu64 " block%s, %s: %s\n",
           a->quick ? "checked without decoding" : "verified", r->checkpoints, cli_plural(r->checkpoints),
           r->files, cli_plural(r->files), r->blocks, cli_plural(r->blocks), cli_text_size(r->bytes).text,
           r->damage_count ? "DAMAGED" : "no damage");
}

/* ------------------------------------------------------------------------------------------------------ checking */

static ckd_status verify(ckd_verify_result **out, const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_verify_options options = CKD_VERIFY_OPTIONS_INIT;
    options.run = a->pick.run;
    options.quick = a->quick;
    options.sample = a->percent / 100;
    options.seed = a->seed;
    ckd_checkpoint checkpoint;
    if (a->pick.step_given || a->pick.tag) {
        ckd_status status = cli_find_pick(&checkpoint, store, &a->pick, err);
        if (status != CKD_OK) {
            return status;
        }
        options.run = checkpoint.run;
        options.step = checkpoint.step;
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

static ckd_status print_result(const arguments *a, const ckd_verify_result *result, ckd_store *store,
                               ckd_error *err) {
    cli_survivors left = {0};
    cli_damage_found(result);
    ckd_status status = cli_find_survivors(&left, result, store, err);
    if (status == CKD_OK && a->common.json) {
        status = print_json(result, &left, a, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        print_text(result, &left, a);
    }
    THEN(status, cli_damage_status(result, &left, err));
    cli_survivors_free(&left);
    return status;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_verify_result *result = NULL;
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_READ, err);
    THEN(status, verify(&result, a, store, err));
    THEN(status, print_result(a, result, store, err));
    ckd_verify_result_free(result);
    ckd_store_close(store);
    return status;
}

int cmd_verify(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_threads_argp, 0, 0, 0}, {&cli_pick_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, CLI_PICK_USAGE, doc, children, 0, 0};
    arguments a = {.common.command = "verify"};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}

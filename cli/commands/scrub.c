/* ckptdelta scrub: an incremental verification that continues where the last one stopped. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/commands/damage.h"
#include "cli/output/output.h"

enum { OPT_RATE = 0x200, OPT_OLDER, OPT_MAX_TIME };

static const struct argp_option options_table[] = {
    {"rate", OPT_RATE, "SIZE", 0,
     "Read at most this much per second, such as 20M; max: no limit [default: 50M]", 1},
    {"older-than", OPT_OLDER, "TIME", 0,
     "Skip files that were verified this long ago or less, such as 36h; 0s: none [default: 7d]", 1},
    {"max-time", OPT_MAX_TIME, "TIME", 0,
     "Start no further file after this time, such as 1h [default: no limit]", 1},
    {0},
};

static const char doc[] =
    "Verify stored files, a part at a time: read the chunk files whose last verification is the oldest, and record when each was found intact. It can be stopped at any time; the next call continues. It blocks no training, save or deletion, and is meant to run every night. Nothing is decoded; ckptdelta verify does that. Exit status 4 if anything is damaged, which is reported as by verify; damaged files are read again each time."
    "\vExamples:\n"
    "  ckptdelta scrub ckpts --max-time 1h\n"
    "  ckptdelta scrub ckpts --rate 200M --older-than 30d\n";

typedef struct arguments {
    cli_options common;
    ckd_scrub_options scrub;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case OPT_RATE:
        a->scrub.bytes_per_s = strcmp(arg, "max") == 0 ? 0 : cli_rate(state, arg);
        return 0;
    case OPT_OLDER:
        a->scrub.older_than_s = cli_seconds(state, "--older-than", arg);
        return 0;
    case OPT_MAX_TIME:
        a->scrub.max_time_s = cli_seconds(state, "--max-time", arg);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static ckd_status print_json(const ckd_scrub_result *s, const cli_survivors *left, ckd_error *err) {
    const ckd_verify_result *r = s->found;
    return cli_json_print(
        json_pack("{s:i, s:b, s:I, s:I, s:I, s:I, s:o, s:o, s:o}", "schema", 1, "ok", r->damage_count == 0,
                  "files", (json_int_t)r->files, "bytes", (json_int_t)r->bytes, "files_left",
                  (json_int_t)s->files_left, "bytes_left", (json_int_t)s->bytes_left, "oldest",
                  s->oldest_ns ? json_string(cli_text_time(s->oldest_ns).text) : json_null(), "damage",
                  cli_json_damage(r), "newest_intact", cli_json_newest(left)),
        err);
}

static void print_text(const ckd_scrub_result *s, const cli_survivors *left, const arguments *a) {
    const ckd_verify_result *r = s->found;
    cli_print_damage(r, left, a->common.store);
    printf("read %" PRIu64 " file%s, %s: %s\n", r->files, cli_plural(r->files), cli_text_size(r->bytes).text,
           r->damage_count ? "DAMAGED" : "no damage");
    if (s->files_left) {
        printf("left for the next call: %" PRIu64 " file%s, %s\n", s->files_left, cli_plural(s->files_left),
               cli_text_size(s->bytes_left).text);
    }
    if (s->oldest_ns) {
        printf("all files were verified since %s\n", cli_text_time(s->oldest_ns).text);
    }
}

static ckd_status scrub(ckd_scrub_result **out, const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_scrub_options options = a->scrub;
    cli_progress progress;
    cli_interrupt_catch();
    cli_progress_begin(&progress, "scrubbing", a->common.quiet);
    options.on_progress = cli_progress_update;
    options.progress_context = &progress;
    ckd_status status = ckd_store_scrub(out, store, &options, err);
    cli_progress_end(&progress);
    if (status == CKD_OK) {
        cli_committed("the scrub is done");
    }
    return status;
}

/* Reports the findings, even of a scrub that was ended early. */
static ckd_status report(const ckd_scrub_result *result, const arguments *a, ckd_store *store,
                         ckd_error *err) {
    cli_survivors left = {0};
    cli_damage_found(result->found);
    ckd_status status = cli_find_survivors(&left, result->found, store, err);
    if (status == CKD_OK && a->common.json) {
        status = print_json(result, &left, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        print_text(result, &left, a);
    }
    THEN(status, cli_damage_status(result->found, &left, err));
    cli_survivors_free(&left);
    return status;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_scrub_result *result = NULL;
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_WRITE, err);
    THEN(status, scrub(&result, a, store, err));
    ckd_error found;
    ckd_status reported = result ? report(result, a, store, &found) : CKD_OK;
    if (reported != CKD_OK) {
        if (status != CKD_OK) {
            cli_note("%s", err->message);
        }
        *err = found;
        status = reported;
    }
    ckd_scrub_result_free(result);
    ckd_store_close(store);
    return status;
}

int cmd_scrub(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE]", doc, children, 0, 0};
    arguments a = {.common.command = "scrub", .scrub = CKD_SCRUB_OPTIONS_INIT};
    a.scrub.bytes_per_s = 50 << 20;
    a.scrub.older_than_s = 7 * 24 * 3600;
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}

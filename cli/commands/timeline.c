/* ckptdelta timeline: how long saves took, stage by stage. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/files/files.h"
#include "cli/output/output.h"
#include "cli/report/report.h"

enum { OPT_LAST = 0x200, OPT_RANKS, OPT_SVG, OPT_FORCE };

static const struct argp_option options_table[] = {
    {"run", 'r', "RUN", 0, "Only this run", 1},
    {"last", OPT_LAST, "N", 0, "Only the N saves that ended last", 1},
    {"ranks", OPT_RANKS, 0, 0, "Show a row for each rank, even if there is only one", 1},
    {"svg", OPT_SVG, "FILE", 0,
     "Draw them instead of the table: a lane for each run and rank, over time; replaces FILE if it is such a picture",
     2},
    {"force", OPT_FORCE, 0, 0, "Replace FILE whatever it is", 2},
    {0},
};

static const char doc[] =
    "Show how long saves took, in the order in which they ended: the time that training waited (sessions only), reading and deciding, encoding, writing, and making durable. If several ranks saved together: for each rank, also the time that it waited for the others, and the commit. Only the catalog has these times, so a rebuild loses them."
    "\vExamples:\n"
    "  ckptdelta timeline ckpts --last 20\n"
    "  ckptdelta timeline ckpts --run gpt --svg saves.svg\n";

typedef struct arguments {
    cli_options common;
    const char *run, *svg;
    uint64_t last;
    bool force, ranks;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case ARGP_KEY_ARG:
        return cli_take_run(&a->common, &a->run, arg, state);
    case 'r':
        a->run = arg;
        return 0;
    case OPT_LAST:
        if (!cli_parse_u64(&a->last, arg) || a->last == 0) {
            argp_error(state, "--last takes a number of saves, not '%s'", arg);
        }
        return 0;
    case OPT_RANKS:
        a->ranks = true;
        return 0;
    case OPT_SVG:
        a->svg = arg;
        return 0;
    case OPT_FORCE:
        a->force = true;
        return 0;
    case ARGP_KEY_END:
        if (a->force && !a->svg) {
            argp_error(state, "--force goes with --svg");
        }
        if (a->svg && strcmp(a->svg, "-") == 0 && a->common.json) {
            argp_error(state, "--svg - takes standard output for itself");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int by_time(const void *a, const void *b) {
    const timeline_save *x = a, *y = b;
    uint64_t left = x->times->created_ns, right = y->times->created_ns;
    return (left > right) - (left < right);
}

/* Combines each save with its ranks' stages. malloc'ed; NULL: out of memory. */
static timeline_save *saves_of(const ckd_timeline *t) {
    timeline_save *saves = calloc(t->count + 1, sizeof(*saves));
    for (size_t i = 0, at = 0; saves && i < t->count; i++) {
        size_t first = at;
        while (at < t->stage_count && t->stages[at].save == i) {
            at++;
        }
        saves[i] = (timeline_save){&t->items[i], t->stages + first, at - first};
    }
    return saves;
}

/* Counts the stages from `at` on that belong to one rank. */
static size_t stages_of_rank(const timeline_save *s, size_t at) {
    size_t end = at;
    while (end < s->stage_count && s->stages[end].rank == s->stages[at].rank) {
        end++;
    }
    return end - at;
}

/* ---- JSON ---- */

static json_t *seconds_of(uint64_t ns) {
    return json_real((double)ns / 1e9);
}

static json_t *ranks_json(const timeline_save *s) {
    json_t *ranks = json_array();
    for (size_t at = 0; at < s->stage_count;) {
        json_t *stages = json_array();
        size_t end = at + stages_of_rank(s, at);
        uint32_t rank = s->stages[at].rank;
        for (; at < end; at++) {
            const ckd_stage_times *t = &s->stages[at];
            cli_json_append(&stages,
                            json_pack("{s:s, s:o, s:o, s:o, s:I}", "stage", ckd_stage_name(t->stage),
                                      "begin_s", seconds_of(t->begin_ns), "end_s", seconds_of(t->end_ns),
                                      "work_s", seconds_of(t->work_ns), "bytes", (json_int_t)t->bytes));
        }
        cli_json_append(&ranks, json_pack("{s:I, s:o}", "rank", (json_int_t)rank, "stages", stages));
    }
    return ranks;
}

static ckd_status print_json(const timeline_save *items, size_t count, ckd_error *err) {
    json_t *saves = json_array();
    for (size_t i = 0; i < count; i++) {
        const ckd_save_times *s = items[i].times;
        cli_json_append(
            &saves,
            json_pack("{s:s, s:I, s:s, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "run", s->run,
                      "step", (json_int_t)s->step, "durable", cli_text_time(s->created_ns).text, "raw_bytes",
                      (json_int_t)s->raw_bytes, "stored_bytes", (json_int_t)s->stored_bytes, "written_bytes",
                      cli_json_known(s->written_bytes), "stall_s", seconds_of(s->stall_ns), "analyse_s",
                      seconds_of(s->analyse_ns), "encode_s", seconds_of(s->encode_ns), "write_s",
                      seconds_of(s->write_ns), "sync_s", seconds_of(s->sync_ns), "total_s",
                      seconds_of(s->total_ns), "ranks", ranks_json(&items[i])));
    }
    return cli_json_print(json_pack("{s:i, s:o}", "schema", 1, "saves", saves), err);
}

/* ---- tables ---- */

static void time_cell(cli_table *t, uint64_t ns) {
    if (ns) {
        cli_table_cell(t,
                       ns < 9950000      ? "%.2f ms"
                       : ns < 9950000000 ? "%.0f ms"
                                         : "%.3g s",
                       (double)ns / (ns < 9950000000 ? 1e6 : 1e9));
    } else {
        cli_table_cell(t, "-");
    }
}

static void time_cells(cli_table *t, const uint64_t *times, size_t count) {
    for (size_t k = 0; k < count; k++) {
        time_cell(t, times[k]);
    }
}

static void save_row(cli_table *t, const ckd_save_times *s, bool ranks) {
    const uint64_t times[] = {s->stall_ns, s->analyse_ns, s->encode_ns, s->write_ns, s->sync_ns};
    cli_table_checkpoint(t, s->run, s->step);
    if (ranks) {
        cli_table_cell(t, "-");
    }
    cli_table_sizes(t, s->raw_bytes, s->stored_bytes);
    cli_table_known_size(t, s->written_bytes);
    time_cells(t, times, sizeof(times) / sizeof(times[0]));
    if (ranks) {
        time_cells(t, (const uint64_t[]){0, 0}, 2);
    }
    time_cell(t, s->total_ns);
    cli_table_cell(t, "%s", cli_text_time(s->created_ns).text);
}

/* Adds a row for `count` stages of one rank. */
static void rank_row(cli_table *t, const ckd_save_times *s, const ckd_stage_times *stages, size_t count) {
    uint64_t times[CKD_STAGE_LAST + 1] = {0}, raw = 0, stored = 0, written = 0, begin = UINT64_MAX, end = 0;
    for (size_t i = 0; i < count; i++) {
        const ckd_stage_times *stage = &stages[i];
        bool lasts = stage->stage >= CKD_STAGE_WAIT; /* such a stage includes no thread work */
        times[stage->stage] = lasts ? stage->end_ns - stage->begin_ns : stage->work_ns;
        raw = stage->stage == CKD_STAGE_ENCODE ? stage->bytes : raw;
        stored = stage->stage == CKD_STAGE_SYNC ? stage->bytes : stored;
        written = stage->stage == CKD_STAGE_WRITE ? stage->bytes : written;
        begin = stage->begin_ns < begin ? stage->begin_ns : begin;
        end = stage->end_ns > end ? stage->end_ns : end;
    }
    cli_table_checkpoint(t, s->run, s->step);
    cli_table_cell(t, "%u", (unsigned)stages[0].rank);
    cli_table_sizes(t, raw, stored);
    cli_table_known_size(t, written);
    time_cells(t, times + CKD_STAGE_SNAPSHOT, CKD_STAGE_LAST);
    time_cell(t, end - begin);
    cli_table_cell(t, "%s", cli_text_time(s->created_ns).text);
}

static void save_rows(cli_table *t, const timeline_save *s, bool ranks) {
    if (!ranks || s->stage_count == 0) {
        save_row(t, s->times, ranks);
        return;
    }
    for (size_t at = 0; at < s->stage_count;) {
        size_t count = stages_of_rank(s, at);
        rank_row(t, s->times, s->stages + at, count);
        at += count;
    }
}

static ckd_status print_text(const timeline_save *saves, size_t count, bool ranks, ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        const timeline_save *s = &saves[i];
        ranks = ranks || (s->stage_count && s->stages[s->stage_count - 1].rank > 0);
    }
    cli_table *t = cli_table_new(
        ranks
            ? "RUN|>STEP|>RANK|>RAW|>STORED|>WRITTEN|>WAITED|>ANALYSE|>ENCODE|>WRITE|>SYNC|>OTHERS|>COMMIT|>TOTAL|DURABLE"
            : "RUN|>STEP|>RAW|>STORED|>WRITTEN|>WAITED|>ANALYSE|>ENCODE|>WRITE|>SYNC|>TOTAL|DURABLE");
    for (size_t i = 0; i < count; i++) {
        save_rows(t, &saves[i], ranks);
    }
    ckd_status status = cli_table_print(t, err);
    if (status == CKD_OK && count == 0) {
        puts("no save in this catalog has timings");
    }
    return status;
}

/* ---- the command ---- */

static ckd_status draw(const arguments *a, const timeline_save *saves, size_t count, ckd_error *err) {
    size_t size;
    char *text = cli_timeline_svg(saves, count, &size);
    if (!text) {
        return cli_error_nomem(err);
    }
    bool talks = cli_prints_text(&a->common) && strcmp(a->svg, "-") != 0;
    return report_file_write(a->svg, text, size, talks, err);
}

static ckd_status show(const arguments *a, const ckd_timeline *timeline, ckd_error *err) {
    timeline_save *saves = saves_of(timeline);
    if (!saves) {
        return cli_error_nomem(err);
    }
    qsort(saves, timeline->count, sizeof(*saves), by_time);
    size_t count = a->last && a->last < timeline->count ? (size_t)a->last : timeline->count;
    const timeline_save *items = saves + (timeline->count - count);
    ckd_status status = a->svg ? draw(a, items, count, err) : CKD_OK;
    if (status == CKD_OK && a->common.json) {
        status = print_json(items, count, err);
    } else if (status == CKD_OK && !a->svg && cli_prints_text(&a->common)) {
        status = print_text(items, count, a->ranks, err);
    }
    free(saves);
    return status;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_timeline *timeline = NULL;
    ckd_status status = a->svg ? report_file_check(a->svg, SVG_MARK, a->force, err) : CKD_OK;
    THEN(status, a->svg ? cli_output_check_outside(a->svg, a->common.store, err) : CKD_OK);
    THEN(status, cli_open_store(&store, &a->common, CKD_OPEN_READ, err));
    THEN(status, cli_check_run(store, a->run, err));
    THEN(status, ckd_store_timeline(&timeline, store, a->run, err));
    THEN(status, show(a, timeline, err));
    ckd_timeline_free(timeline);
    ckd_store_close(store);
    return status;
}

int cmd_timeline(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] [RUN]", doc, children, 0, 0};
    arguments a = {.common.command = "timeline"};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail_with_hint(&err, &a.common);
}

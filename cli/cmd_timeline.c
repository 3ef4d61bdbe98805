/* ckptdelta timeline: how long saves took, and what of it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/commands.h"
#include "cli/json_out.h"
#include "cli/options.h"
#include "cli/output_file.h"
#include "cli/table.h"
#include "cli/text.h"
#include "cli/timeline_svg.h"

enum { OPT_RUN = 0x200, OPT_LAST, OPT_SVG, OPT_FORCE };

static const struct argp_option options_table[] = {
    {"run", OPT_RUN, "RUN", 0, "Only this run", 1},
    {"last", OPT_LAST, "N", 0, "Only the N saves that ended last", 1},
    {"svg", OPT_SVG, "FILE", 0, "Draw them, too: when training waited, and what the saves did, over time", 2},
    {"force", OPT_FORCE, 0, 0, "Replace FILE if it exists", 2},
    {0},
};

static const char doc[] =
    "Say how long saves took, in the order in which they ended: what training waited for (sessions only), reading and deciding, encoding, writing, and making durable. "
    "Only the catalog knows: after a rebuild these times are gone."
    "\vExamples:\n"
    "  ckptdelta timeline ckpts --last 20\n"
    "  ckptdelta timeline ckpts --run gpt --svg saves.svg\n";

typedef struct arguments {
    cli_options common;
    const char *run, *svg;
    uint64_t last;
    bool force;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case OPT_RUN:
        a->run = arg;
        return 0;
    case OPT_LAST:
        if (!cli_parse_u64(&a->last, arg) || a->last == 0) {
            argp_error(state, "--last takes a number of saves, not '%s'", arg);
        }
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
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int by_time(const void *a, const void *b) {
    const ckd_save_times *x = a, *y = b;
    return (x->created_ns > y->created_ns) - (x->created_ns < y->created_ns);
}

static json_t *seconds_of(uint64_t ns) {
    return json_real((double)ns / 1e9);
}

static ckd_status print_json(const ckd_save_times *items, size_t count, ckd_error *err) {
    json_t *saves = json_array();
    for (size_t i = 0; i < count; i++) {
        const ckd_save_times *s = &items[i];
        cli_json_append(&saves,
                        json_pack("{s:s, s:I, s:s, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "run", s->run,
                                  "step", (json_int_t)s->step, "durable", cli_text_time(s->created_ns).text,
                                  "raw_bytes", (json_int_t)s->raw_bytes, "stored_bytes",
                                  (json_int_t)s->stored_bytes, "stall_s", seconds_of(s->stall_ns),
                                  "analyse_s", seconds_of(s->analyse_ns), "encode_s",
                                  seconds_of(s->encode_ns), "write_s", seconds_of(s->write_ns), "sync_s",
                                  seconds_of(s->sync_ns), "total_s", seconds_of(s->total_ns)));
    }
    return cli_json_print(json_pack("{s:i, s:o}", "schema", 1, "saves", saves), err);
}

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

static ckd_status print_text(const ckd_save_times *items, size_t count, ckd_error *err) {
    cli_table *t =
        cli_table_new("RUN|>STEP|>RAW|>STORED|>WAITED|>ANALYSE|>ENCODE|>WRITE|>SYNC|>TOTAL|DURABLE");
    for (size_t i = 0; i < count; i++) {
        const ckd_save_times *s = &items[i];
        cli_table_cell(t, "%s", s->run);
        cli_table_cell(t, "%" PRIu64, s->step);
        cli_table_cell(t, "%s", cli_text_size(s->raw_bytes).text);
        cli_table_cell(t, "%s", cli_text_size(s->stored_bytes).text);
        const uint64_t times[] = {s->stall_ns, s->analyse_ns, s->encode_ns,
                                  s->write_ns, s->sync_ns,    s->total_ns};
        for (size_t k = 0; k < sizeof(times) / sizeof(times[0]); k++) {
            time_cell(t, times[k]);
        }
        cli_table_cell(t, "%s", cli_text_time(s->created_ns).text);
    }
    ckd_status status = cli_table_print(t, err);
    if (status == CKD_OK && count == 0) {
        puts("no save in this catalog has timings");
    }
    return status;
}

static ckd_status draw(const arguments *a, const ckd_save_times *items, size_t count, ckd_error *err) {
    size_t size;
    char *text = cli_timeline_svg(items, count, &size);
    if (!text) {
        return cli_error_nomem(err);
    }
    ckd_status status = cli_output_bytes(a->svg, a->force, text, size, err);
    free(text);
    return status;
}

static ckd_status show(const arguments *a, const ckd_timeline *timeline, ckd_error *err) {
    if (timeline->count > 0) {
        qsort(timeline->items, timeline->count, sizeof(*timeline->items), by_time);
    }
    size_t count = a->last && a->last < timeline->count ? (size_t)a->last : timeline->count;
    const ckd_save_times *items = timeline->items + (timeline->count - count);
    ckd_status status = a->svg ? draw(a, items, count, err) : CKD_OK;
    if (status == CKD_OK && a->common.json) {
        status = print_json(items, count, err);
    } else if (status == CKD_OK && cli_talks(&a->common)) {
        status = print_text(items, count, err);
    }
    return status;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_timeline *timeline = NULL;
    ckd_status status = a->svg ? cli_output_check(a->svg, a->force, err) : CKD_OK;
    if (status == CKD_OK) {
        status = cli_open_store(&store, &a->common, CKD_OPEN_READ, err);
    }
    if (status == CKD_OK && a->run) { /* says what there is, if it is not there */
        ckd_checkpoint newest;
        status = cli_find(&newest, store, a->run, CKD_LATEST, err);
    }
    if (status == CKD_OK) {
        status = ckd_store_timeline(&timeline, store, a->run, err);
    }
    if (status == CKD_OK) {
        status = show(a, timeline, err);
    }
    ckd_timeline_free(timeline);
    ckd_store_close(store);
    return status;
}

int cmd_timeline(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "STORE", doc, children, 0, 0};
    arguments a = {.common.command = "timeline"};
    argp_parse(&argp, argc, argv, 0, NULL, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail_reading(&err, &a.common);
}

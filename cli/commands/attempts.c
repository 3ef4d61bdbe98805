/* ckptdelta attempts: shows the attempts that `ckptdelta run` has recorded. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"
#include "supervise/supervise.h"

static const struct argp_option options_table[] = {
    {"run", 'r', "RUN", 0, "Only this run", 1},
    {0},
};

static const char doc[] =
    "List the attempts that ckptdelta run has made: how each ended, and from which checkpoint it "
    "started."
    "\vExamples:\n"
    "  ckptdelta attempts ckpts\n"
    "  ckptdelta attempts ckpts gpt -v\n"
    "  ckptdelta attempts ckpts --json\n";

typedef struct arguments {
    cli_options common;
    const char *run;
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
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* Counts the steps that, as far as is known, were made before and that the attempt had to repeat. */
static bool steps_lost(uint64_t *lost, const attempt *a) {
    bool saved = a->first_step != SUPERVISE_NO_STEP, reported = a->reached != SUPERVISE_NO_STEP;
    uint64_t from = a->from_step == SUPERVISE_NO_STEP ? 0 : a->from_step;
    uint64_t top = saved ? a->first_step : 0;
    top = reported && a->reached > top ? a->reached : top;
    *lost = top > from ? top - from : 0;
    return reported || (saved && a->from_step != SUPERVISE_NO_STEP);
}

/* Without a counter, the steps after the newest checkpoint may have been lost as well. */
static bool is_exact(const attempt *a) {
    return a->reached != SUPERVISE_NO_STEP;
}

/* -------------------------------------------------------------------------------------------------------- JSON */

_Static_assert(SUPERVISE_NO_STEP == CKD_LATEST, "cli_json_step prints both as null");

static json_t *json_if(bool known, int64_t value) {
    return known ? json_integer(value) : json_null();
}

static json_t *json_seconds(uint64_t ns) {
    return ns ? json_real((double)ns / 1e9) : json_null();
}

static json_t *json_words(const char *text) {
    return cli_json_text(text[0] ? text : NULL);
}

/* Turns words separated by spaces into a list; NULL becomes null. */
static json_t *json_list(const char *words) {
    json_t *list = words ? json_array() : json_null();
    for (const char *at = words; at && *at; at += strcspn(at, " "), at += *at == ' ') {
        cli_json_append(&list, json_stringn(at, strcspn(at, " ")));
    }
    return list;
}

static json_t *json_attempt(const attempt *a) {
    uint64_t lost;
    bool known = steps_lost(&lost, a), ended = a->end != ATTEMPT_RUNNING;
    json_t *start = cli_json_text(cli_text_time(a->start_ns).text);
    json_t *end = cli_json_text(a->end_ns ? cli_text_time(a->end_ns).text : NULL);
    double seconds = a->end_ns > a->start_ns ? (double)(a->end_ns - a->start_ns) / 1e9 : 0;
    return json_pack(
        "{s:o, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:b, s:I, s:o, s:o, s:o}",
        "run", cli_json_text(a->run), "attempt", (json_int_t)a->number, "host", json_words(a->host), "pid",
        json_if(a->pid > 0, a->pid), "start", start, "end", end, "seconds",
        ended ? json_real(seconds) : json_null(), "exit", json_if(a->end == ATTEMPT_EXITED, a->code),
        "signal", json_if(a->end == ATTEMPT_KILLED, a->code), "stopped_by",
        json_if(a->stopped_by > 0, a->stopped_by), "reason", json_words(a->reason), "verdict",
        json_words(a->verdict), "status", json_if(ended && a->status >= 0, a->status), "checkpoint",
        json_words(a->from), "first_step", cli_json_step(a->first_step), "last_step",
        cli_json_step(a->last_step), "steps_lost", json_if(known, (int64_t)lost), "first_save_s",
        json_seconds(a->first_save_ns), "hung", a->hung, "hang", json_words(a->hang), "first_trained",
        cli_json_step(a->first_trained), "last_trained", cli_json_step(a->last_trained), "resume_s",
        json_seconds(a->resume_ns), "suspect", json_words(a->suspect), "hosts", json_list(a->hosts),
        "bad_hosts", json_list(a->bad_hosts), "excluded", json_list(a->excluded), "anomaly",
        json_words(a->anomaly), "unhealthy", a->unhealthy, "alarms", (json_int_t)a->alarms, "alarm",
        json_words(a->alarm), "alarm_step", cli_json_step(a->alarm_step), "trained_s",
        json_seconds(a->trained_ns));
}

static ckd_status print_json(const attempt_list *list, ckd_error *err) {
    json_t *items = json_array();
    for (size_t i = 0; i < list->count; i++) {
        cli_json_append(&items, json_attempt(&list->items[i]));
    }
    return cli_json_print(json_pack("{s:i, s:o}", "schema", 1, "attempts", items), err);
}

/* -------------------------------------------------------------------------------------------------------- text */

static void step_cell(cli_table *t, uint64_t step) {
    if (step == SUPERVISE_NO_STEP) {
        cli_table_cell(t, "-");
    } else {
        cli_table_cell(t, "%" PRIu64, step);
    }
}

static void duration_cell(cli_table *t, bool known, uint64_t ns) {
    cli_table_cell(t, "%s", known ? cli_text_duration((double)ns / 1e9).text : "-");
}

/* The first of the hosts, and how many more there are. */
static void hosts_cell(cli_table *t, const char *hosts) {
    size_t more = 0;
    for (const char *at = hosts; at && *at; at++) {
        more += *at == ' ';
    }
    if (more > 0) {
        cli_table_cell(t, "%.*s +%zu", (int)strcspn(hosts, " "), hosts, more);
    } else {
        cli_table_cell(t, "%s", hosts ? hosts : "-");
    }
}

static void print_row(cli_table *t, const attempt *a, bool verbose) {
    uint64_t lost;
    bool known = steps_lost(&lost, a), ended = a->end_ns > a->start_ns;
    cli_table_cell(t, "%s", a->run);
    cli_table_cell(t, "%" PRIu64, a->number);
    cli_table_cell(t, "%s", cli_text_time(a->start_ns).text);
    duration_cell(t, ended, a->end_ns - a->start_ns);
    cli_table_cell(t, "%s", a->from[0] ? a->from : "-");
    step_cell(t, a->last_step);
    cli_table_cell(t,
                   !known || (!is_exact(a) && !lost) ? "-"
                   : is_exact(a)                     ? "%" PRIu64
                                                     : "%" PRIu64 "+",
                   lost);
    cli_table_cell(t, "%s", a->end == ATTEMPT_RUNNING ? "running" : a->reason);
    if (verbose) {
        step_cell(t, a->first_trained);
        step_cell(t, a->last_trained);
        duration_cell(t, a->resume_ns > 0, a->resume_ns);
        duration_cell(t, a->first_save_ns > 0, a->first_save_ns);
        cli_table_cell(t, "%s", a->host[0] ? a->host : "-");
        hosts_cell(t, a->hosts);
        cli_table_cell(t, "%s", a->bad_hosts ? a->bad_hosts : "-");
        cli_table_cell(t, a->pid > 0 ? "%" PRId64 : "-", a->pid);
        cli_table_cell(t, "%s", a->alarm[0] ? a->alarm : "-");
        cli_table_cell(t, "%s", a->verdict[0] ? a->verdict : "-");
    }
}

static ckd_status print_text(const attempt_list *list, bool verbose, ckd_error *err) {
    cli_table *t = cli_table_new(
        verbose
            ? "RUN|>ATTEMPT|STARTED|>TOOK|FROM|>LAST STEP|>LOST|END|>FIRST MADE|>LAST MADE|>RESUMED|>FIRST SAVE|HOST|RAN ON|BAD|>PID|ALARM|VERDICT"
            : "RUN|>ATTEMPT|STARTED|>TOOK|FROM|>LAST STEP|>LOST|END");
    for (size_t i = 0; i < list->count; i++) {
        print_row(t, &list->items[i], verbose);
    }
    return cli_table_print(t, err);
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    attempt_list list = {0};
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_READ, err);
    THEN(status, supervise_attempts(&list, a->common.store, a->run, err));
    if (status == CKD_OK && list.damaged) {
        cli_note("%zu line%s of %s/attempts.jsonl %s damaged and left out", list.damaged,
                 cli_plural(list.damaged), a->common.store, list.damaged == 1 ? "is" : "are");
    }
    if (status == CKD_OK && a->run && list.count == 0) {
        status = cli_error(err, CKD_E_NOT_FOUND, "the store has no attempts of run '%s'", a->run);
    }
    if (status == CKD_OK && a->common.json) {
        status = print_json(&list, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        status = print_text(&list, a->common.verbose > 0, err);
    }
    supervise_attempts_free(&list);
    ckd_store_close(store);
    return status;
}

int cmd_attempts(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] [RUN]", doc, children, 0, 0};
    arguments a = {.common.command = "attempts"};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}

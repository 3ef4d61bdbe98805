/* The interface of cli/output/ for other rooms. README.md has an overview. */
#ifndef CLI_OUTPUT_OUTPUT_H
#define CLI_OUTPUT_OUTPUT_H

#include <argp.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "ckptdelta.h"

/* Parses a subcommand's arguments, and suggests corrections for unknown words. */

/*
 * Runs argp_parse. Unknown options end the process with status 2; the message suggests the nearest existing one.
 * argv[0] is "ckptdelta COMMAND".
 */
void cli_parse_arguments(const struct argp *argp, int argc, char **argv, void *input);

/*
 * Returns the candidate of which `word` is probably a misspelling: one or two letters missing, added, wrong or swapped.
 * NULL: none is that near.
 */
const char *cli_nearest(const char *word, const char *const *candidates, size_t count);

/* Error messages and exit statuses. Only this code prints errors. */

/* Part of the interface: docs/cli.md. Interrupted by a signal: 128 + its number. */
enum { CLI_DONE = 0, CLI_FAILED = 1, CLI_USAGE = 2, CLI_NOT_FOUND = 3, CLI_CORRUPT = 4 };

/* The next of several steps: runs `step` if `status` is CKD_OK and stores its result there. As in the library. */
#define THEN(status, step)        \
    do {                          \
        if ((status) == CKD_OK) { \
            (status) = (step);    \
        }                         \
    } while (0)

#define CLI_PRINTF(string, first) __attribute__((format(printf, string, first)))

/*
 * Starts a fresh error: clears tensor, file, offset and errno. `err` is never NULL in the command. Returns the status.
 */
ckd_status cli_error(ckd_error *err, ckd_status status, const char *format, ...) CLI_PRINTF(3, 4);
/* As cli_error, at an offset of a file; offset may be CKD_NO_OFFSET. */
ckd_status cli_error_at(ckd_error *err, ckd_status status, const char *file, uint64_t offset,
                        const char *format, ...) CLI_PRINTF(5, 6);
/* Reports a failed system call on `file`. The status follows errnum; ": " and its text are appended. */
ckd_status cli_error_sys(ckd_error *err, int errnum, const char *file, const char *format, ...)
    CLI_PRINTF(4, 5);
ckd_status cli_error_nomem(ckd_error *err);
/* Adds the tensor to an error on its way up. */
ckd_status cli_error_tensor(ckd_error *err, const char *tensor);

/*
 * Returns the exit status: INVALID is bad usage, NOT_FOUND 3, CORRUPT 4, as is UNSUPPORTED of a file; everything else
 * 1.
 */
int cli_exit_code(const ckd_error *err);

/*
 * Prints `ckptdelta: message (tensor X, file Y, offset Z)` on stderr. Returns the exit status: that of err->status, or
 * 128 + the signal that asked to stop.
 */
int cli_fail(const ckd_error *err);
/* As cli_fail, with an exit status of its own, which is returned. */
int cli_fail_as(const ckd_error *err, int code);

/*
 * Call it when damage is known, or when checkpoints were left out and the work on the others is done. The exit status
 * is then 4, whatever error follows: 0 would say that all is well, 1 that nothing was done.
 */
void cli_left_out(void);

/*
 * Call it when the command's work is done and durable: "a@1 is saved". Afterwards an output failure (a full disk behind
 * standard output, a closed pipe) is reported, but the exit status stays CLI_DONE. Damage found meanwhile is still
 * CLI_CORRUPT.
 */
void cli_committed(const char *format, ...) CLI_PRINTF(1, 2);

/* Flushes standard output, as the last but one step of a command, and detects lost output. */
int cli_flush_output(int code);

/*
 * Escapes control characters on stderr from now on, except line ends and tabs, since argp and getopt print arguments
 * unchanged. Terminal control sequences must go to the descriptor instead.
 */
void cli_clean_stderr(void);

/*
 * Prints each message on stderr as a line with one JSON object from now on, `message` of docs/cli.md. Output of argp
 * and getopt means wrong usage: its first line becomes such an object at exit (cli_flush_errors).
 */
void cli_errors_as_json(void);
/* Runs at exit with this status. */
void cli_flush_errors(int code);

/* Prints a note on stderr. */
void cli_note(const char *format, ...) CLI_PRINTF(1, 2);

/* A ckd_message_fn; context is a const cli_options *. */
void cli_on_message(void *context, const char *message);

/* Finds checkpoints of a list by id: a list may have a hundred thousand, each naming two others. */

bool cli_has_id(const ckd_checkpoint *c, const ckd_id *id);
bool cli_id_is_none(const ckd_id *id);
/* Returns the first with this id, by linear search; NULL if there is none. */
const ckd_checkpoint *cli_by_id(const ckd_checkpoint_list *all, const ckd_id *id);

typedef struct cli_ids {
    const ckd_checkpoint_list *all;
    const ckd_checkpoint **slots; /* open addressing; NULL: use cli_by_id */
    size_t capacity;
} cli_ids;
/*
 * Makes an index for many look-ups. The list must stay valid. Release with cli_ids_free, which accepts a zeroed index.
 */
ckd_status cli_ids_make(cli_ids *out, const ckd_checkpoint_list *all, ckd_error *err);
void cli_ids_free(cli_ids *ids);
/* As cli_by_id. */
const ckd_checkpoint *cli_ids_find(const cli_ids *ids, const ckd_id *id);

/* Numbers in human-readable form. */

typedef struct cli_text {
    char text[48];
} cli_text;

/* "512 B", "12.3 MiB" */
cli_text cli_text_size(uint64_t bytes);
/* "1.31x"; "-" if undefined */
cli_text cli_text_ratio(uint64_t raw, uint64_t stored);
/* "2 s", "3 min 20 s", "1 h 12 min", "400 days" */
cli_text cli_text_duration(double seconds);
/* "2026-01-31T23:59:59Z" from nanoseconds since 1970 */
cli_text cli_text_time(uint64_t nanoseconds);
/* Short decimal: "0.25", "1.3e-07"; "-" for NaN */
cli_text cli_text_number(double value);
/* "", or "s" for a noun with any count but 1 */
const char *cli_plural(uint64_t count);

/* Returns the columns that UTF-8 text takes, counting every code point as one. */
size_t cli_text_width(const char *text);
/*
 * Prints text with unsafe bytes as \xNN: control characters, characters that change the writing direction or have no
 * width, and invalid UTF-8. Names come from files; they must not steer the terminal or imitate other names.
 */
void cli_print_clean(FILE *to, const char *text);
/* Passes JSON on, with such characters in its strings as \uXXXX, which mean the same to a parser. */
typedef void (*cli_put_fn)(void *to, const char *text, size_t size);
void cli_put_json(cli_put_fn put, void *to, const char *text, size_t size);
/* As cli_print_clean, into a new string; NULL if out of memory. */
char *cli_clean_copy(const char *text);
/* Copies text with '?' for each byte that is not UTF-8; NULL if out of memory. */
char *cli_utf8_copy(const char *text);
/* As cli_print_clean, as one word of a shell command: in single quotes if it needs them. */
void cli_print_word(FILE *to, const char *text);
/* As cli_clean_copy, with the ASCII characters of `allowed` unchanged. */
char *cli_clean_but(const char *text, const char *allowed);

/*
 * Parts of a self-contained HTML page: no scripts, no external resources, light or dark as the reader's browser
 * prefers.
 */

/* Escapes text from any source, for content and quoted attributes. Bytes that are not UTF-8 become '?'. */
void html_text(FILE *to, const char *text);
/*
 * Writes the page up to and including the title's <h1>, and its end. HTML_PAGE_MARK at the start identifies our pages.
 */
#define HTML_PAGE_MARK "<!doctype html>\n<!-- ckptdelta -->\n"
void html_page_begin(FILE *to, const char *title);
void html_page_end(FILE *to);

/*
 * A chart of curves. Shapes stretch with the page; text does not. A linear vertical axis has round numbers, a
 * logarithmic one powers of two.
 */
typedef cli_text (*html_label_fn)(double value);
typedef struct html_point {
    double x, y;
} html_point;
typedef struct html_chart {
    FILE *to; /* the caller sets these */
    const char *title;
    double left, right; /* range of x */
    double min, max;    /* range of y; positive if logarithmic */
    bool logarithmic;
    html_label_fn label; /* of a value on the axis; NULL: by scale and unit */
    double scale;
    const char *unit;
    double low, high, every; /* the axis, set by html_chart_begin; logarithmic: exponents of two */
} html_chart;
void html_chart_begin(html_chart *c);
/* Draws a dot of series 1 ... HTML_SERIES_MAX; `about` is its tooltip. */
#define HTML_SERIES_MAX 6
void html_chart_dot(const html_chart *c, html_point at, int series, const char *about);
void html_chart_line(const html_chart *c, const html_point *points, size_t count, int series);
/* Fills the area between two curves over the same places; below NULL: down to the axis. */
void html_chart_area(const html_chart *c, const html_point *above, const html_point *below, size_t count,
                     const char *class);
/* Ends the drawing. Labels the horizontal axis by round numbers, or its ends by texts. */
void html_chart_end(const html_chart *c);
void html_chart_end_texts(const html_chart *c, const char *left, const char *right);
/* Adds to a list of class "legend". */
void html_legend_item(FILE *to, int series, const char *name);
/* Prints round numbers under a drawing whose horizontal axis is linear. */
void html_numbers(FILE *to, double left, double right);
/* Returns the distance of round numbers that divides the range into at most `parts` parts. */
double html_round_step(double range, double parts);

/*
 * JSON on stdout: one object with "schema": 1. docs/cli.md defines the fields. Functions return NULL when out of memory
 * and pass on a NULL argument, so only cli_json_print checks.
 */

/* Makes a string; bytes that are not UTF-8 become '?'. NULL becomes null. */
json_t *cli_json_text(const char *text);
/* null for NaN and infinities */
json_t *cli_json_double(double value);
json_t *cli_json_ratio(uint64_t raw, uint64_t stored);
json_t *cli_json_known(uint64_t size); /* 0: not known, null */
json_t *cli_json_step(uint64_t step);  /* CKD_LATEST: there is none, null */
/* Appends `item` and takes ownership of it. On failure frees the array and sets it to NULL. */
void cli_json_append(json_t **array, json_t *item);

/* Makes a checkpoint's object. `all` is searched for its relatives. */
json_t *cli_json_checkpoint(const ckd_checkpoint *c, const ckd_checkpoint_list *all);
/*
 * The checkpoints of a store, among which relatives are searched when something committed is printed. If they cannot be
 * listed now, a message says so, and `all` is empty. The result is printed in any case.
 */
typedef struct cli_relatives {
    const ckd_checkpoint_list *all; /* never NULL */
    ckd_checkpoint_list *list;
} cli_relatives;
cli_relatives cli_relatives_find(ckd_store *store);
void cli_relatives_free(cli_relatives *r);
/* Makes a checkpoint's object with these relatives. */
json_t *cli_json_checkpoint_of(const ckd_checkpoint *c, ckd_store *store);
/* {"schema": 1, "checkpoints": [c]} */
json_t *cli_json_one_checkpoint(const ckd_checkpoint *c, const ckd_checkpoint_list *all);

/* Prints and frees the object. */
ckd_status cli_json_print(json_t *root, ckd_error *err); /* escapes terminal control characters in names */
/* As cli_json_print, on one line: for commands that print several objects. */
ckd_status cli_json_print_line(json_t *root, ckd_error *err);
/*
 * As cli_json_print, with the checkpoints of `list` as an array in member `key`. They are printed one by one, in a
 * fraction of the time of a complete tree. `all` is searched for their relatives.
 */
ckd_status cli_json_print_list(json_t *root, const char *key, const ckd_checkpoint_list *list,
                               const ckd_checkpoint_list *all, ckd_error *err);

/* "RUN@STEP" */
typedef struct cli_ref_text {
    char text[CKD_RUN_MAX + 24];
} cli_ref_text;
cli_ref_text cli_ref_text_of(const ckd_checkpoint *c);

/* Errors of the lossy checkpoints in a list. */

/*
 * Makes a JSON array with an object for each lossy checkpoint of the list. Checkpoints that another process has deleted
 * meanwhile are removed from the list. Damaged ones get no errors, which a note reports.
 */
ckd_status cli_lossy_errors(json_t **out, ckd_store *store, ckd_checkpoint_list *list, ckd_error *err);

/* Tables: aligned columns on stdout, or HTML. */

typedef struct cli_table cli_table;

/*
 * Makes a table. `columns`: headings separated by '|'; a leading '>' aligns a column to the right. NULL if out of
 * memory; all calls below accept NULL, so only cli_table_print must be checked.
 */
cli_table *cli_table_new(const char *columns);
/* Adds the next cell, row by row. */
void cli_table_cell(cli_table *t, const char *format, ...) CLI_PRINTF(2, 3);
/* Two cells: a run and a step; sizes in memory and in the store. */
void cli_table_checkpoint(cli_table *t, const char *run, uint64_t step);
void cli_table_sizes(cli_table *t, uint64_t raw, uint64_t stored);
void cli_table_known_size(cli_table *t, uint64_t size); /* 0: not known, "-" */
/* Prints and frees the table. Prints nothing if it has no rows or a cell was lost (NOMEM). */
ckd_status cli_table_print(cli_table *t, ckd_error *err);
/* As cli_table_print, as HTML. */
ckd_status cli_table_print_html(FILE *to, cli_table *t, ckd_error *err);

/* Pins and tags, as shown by several commands. */

typedef struct cli_marks {
    ckd_pin_list *pins;
    ckd_tag_list *tags;
} cli_marks;

ckd_status cli_marks_read(cli_marks *out, ckd_store *store, ckd_error *err);
void cli_marks_free(cli_marks *m);
bool cli_marks_any(const cli_marks *m);

/*
 * Make the JSON lists `pinned` and `tagged` (docs/cli.md) for the checkpoints `listed` (NULL: all). `all` gives their
 * names.
 */
json_t *cli_json_pins(const cli_marks *m, const ckd_checkpoint_list *listed, const ckd_checkpoint_list *all);
json_t *cli_json_tags(const cli_marks *m, const ckd_checkpoint_list *listed, const ckd_checkpoint_list *all);

/* Adds a table cell with one checkpoint's marks: "pinned @best @prod", or "-". */
void cli_marks_cell(cli_table *t, const cli_marks *m, const ckd_checkpoint *c);
/* Prints one checkpoint's marks, one per line with reasons, as in `show`. */
void cli_marks_print(const cli_marks *m, const ckd_checkpoint *c);

typedef enum cli_mark_kind { CLI_PINS, CLI_TAGS } cli_mark_kind;
/* Prints all marks of a kind: as JSON, or as a table if `talks`. */
ckd_status cli_report_marks(ckd_store *store, cli_mark_kind kind, bool json, bool talks, ckd_error *err);

/*
 * Shared by the commands: arguments by glibc's argp, their values, opening the store, choosing a checkpoint. Parsers
 * end the process with status 2 and a hint for an invalid argument.
 */

/* STORE, --json, -q, -v: every command. */
typedef struct cli_options {
    const char *command; /* "save" */
    const char *store;   /* the first argument, or $CKPTDELTA_STORE */
    bool json, quiet;
    int verbose;
    uint32_t threads; /* 0: one per core */
    uint64_t staging; /* bytes; 0: the library's default */
    bool keeps_trash; /* opening the store for writing removes nothing from the trash, as in a dry run */
} cli_options;
extern const struct argp cli_common_argp;
/*
 * Takes the first argument as the STORE. If CKPTDELTA_STORE is set, STORE may be omitted. Then the argument is only
 * taken if it is a directory, or ends with a slash (for a new one). Commands with further arguments call this before
 * they take one; cli_common_argp does it for the others.
 */
bool cli_take_store(cli_options *options, const char *argument);
/* Takes an argument as the STORE, or as the RUN that may follow it. --run means the same. For argp's ARGP_KEY_ARG. */
error_t cli_take_run(cli_options *options, const char **run, const char *argument, struct argp_state *state);
/* Returns the store named by the environment; NULL: none. */
const char *cli_default_store(void);
/* --threads, for commands that encode or decode; the input includes the cli_options. */
extern const struct argp cli_threads_argp;
/* --staging, for commands that save or load; same input. */
extern const struct argp cli_staging_argp;

/* A run and a step as written (RUN@STEP), or a tag (@TAG). */
typedef struct cli_ref {
    char run[CKD_RUN_MAX + 1]; /* "": not given */
    uint64_t step;             /* CKD_LATEST for `latest` */
    char tag[CKD_RUN_MAX + 1]; /* "": not given; otherwise run and step are empty */
} cli_ref;

/* A checkpoint: an argument [RUN@]STEP or @TAG; or --run and --step; or --tag. */
typedef struct cli_pick {
    const char *run; /* NULL: the store's only run */
    uint64_t step;
    bool step_given;
    const char *tag; /* NULL: not given; otherwise run and step are not */
    cli_ref ref;     /* of the argument; run and tag may point into it */
    bool ref_given;
} cli_pick;
extern const struct argp cli_pick_argp;
#define CLI_PICK_USAGE "[STORE] [[RUN@]STEP | @TAG]"

/* Several named checkpoints. Release items with free. */
typedef struct cli_refs {
    cli_ref *items;
    size_t count;
} cli_refs;
/* Adds RUN@STEP; ends the process if it is malformed. */
error_t cli_refs_add(cli_refs *refs, const char *text, struct argp_state *state);
/* As cli_refs_add; also accepts RUN@latest and @TAG. */
error_t cli_refs_add_any(cli_refs *refs, const char *text, struct argp_state *state);
/* Parses "30s", "90m", "36h", "7d" into seconds; ends the process if malformed. */
uint64_t cli_seconds(struct argp_state *state, const char *name, const char *text);
/* Parses --rate, in bytes per second; ends the process if it is not a size, or 0. */
uint64_t cli_rate(struct argp_state *state, const char *text);

/* Ends the process if the value of an option was refused: a status that is not CKD_OK is wrong usage. */
void cli_check_value(struct argp_state *state, ckd_status status, const ckd_error *err);

/* Parsers of values; they return false for invalid text. Numbers are decimal, and finite. */
bool cli_parse_u64(uint64_t *out, const char *text);
bool cli_parse_double(double *out, const char *text);
bool cli_parse_size(uint64_t *out,
                    const char *text); /* bytes, optionally with K, M, G or T, which are binary */
bool cli_parse_group(uint32_t *data, uint32_t *parity, const char *text); /* K+M, neither of them 0 */
bool cli_parse_step(uint64_t *out, const char *text);                     /* a number, or `latest` */
bool cli_parse_ref(cli_ref *out, const char *text);                       /* [RUN@]STEP or @TAG */

/* Is human output wanted on stdout? Not with -q or --json. */
bool cli_prints_text(const cli_options *options);

/* As cli_fail; after damage it adds a hint how to find out more. */
int cli_fail_with_hint(const ckd_error *err, const cli_options *options);
/* Returns the length of the store's path if the error names a file in the store, otherwise 0. */
size_t cli_error_in_store(const ckd_error *err, const cli_options *options);

/* Opens the store. The library's messages become notes. */
ckd_status cli_open_store(ckd_store **out, const cli_options *options, ckd_open_mode mode, ckd_error *err);
/* Begins a load with the memory that --staging allows. */
ckd_status cli_load_begin(ckd_load **out, ckd_store *store, const ckd_id *checkpoint,
                          const cli_options *options, ckd_error *err);
/*
 * Marks a deletion of checkpoints as committed (cli_committed). now: removes their files, too. If they must stay for
 * now, a note says so; that is no failure.
 */
void cli_finish_deletion(ckd_store *store, bool now);
/* The hint how to undo a deletion. It names the checkpoints, unless there are many. */
enum { CLI_UNDO_NAMES = 4 };
typedef struct cli_undo {
    cli_ref_text names[CLI_UNDO_NAMES];
    size_t count; /* may exceed that */
} cli_undo;
void cli_undo_add(cli_undo *u, const ckd_checkpoint *deleted);
/* Prints "to undo this within 24 h 0 min: ckptdelta trash ckpts --restore gpt@100". */
void cli_undo_print(const cli_undo *u, const char *store, uint64_t undo_s);
/*
 * Finds the checkpoint at (run, step). run NULL: the only run; if there are several, INVALID with a list of them. The
 * message of NOT_FOUND lists what exists.
 */
ckd_status cli_find(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step, ckd_error *err);
ckd_status cli_find_pick(ckd_checkpoint *out, ckd_store *store, const cli_pick *pick, ckd_error *err);
/* Does it ask for the newest checkpoint? */
bool cli_pick_is_latest(const cli_pick *pick);
/* As cli_find_pick, but passes over suspect checkpoints if the newest one is asked for. */
ckd_status cli_find_healthy(ckd_checkpoint *out, ckd_store *store, const cli_pick *pick, ckd_error *err);
/* Fails as cli_find if the store has no checkpoint of the run. run NULL: all runs, of which there need be none. */
ckd_status cli_check_run(ckd_store *store, const char *run, ckd_error *err);
/* run: used for a ref without a run; may be NULL. */
ckd_status cli_find_ref(ckd_checkpoint *out, ckd_store *store, const cli_ref *ref, const char *run,
                        ckd_error *err);

/*
 * Long operations: a progress line on stderr, only on a terminal and only after a second; and SIGINT, SIGTERM and
 * SIGHUP, after which the command cleans up before it exits.
 */

typedef struct cli_progress {
    const char *verb; /* "saving" */
    bool enabled;     /* stderr is a terminal and -q is not set */
    bool drawn;       /* a line is on screen */
    uint64_t started_ns, drawn_ns;
} cli_progress;

void cli_progress_begin(cli_progress *p, const char *verb, bool quiet);
/* A ckd_progress_fn with a cli_progress * as context. Returns non-zero once a signal has asked to stop. */
int cli_progress_update(void *context, uint64_t done, uint64_t total);
/* Clears the line. Call it before printing anything else; repeated calls are harmless. */
void cli_progress_end(cli_progress *p);

/* Is it time to draw? A second must have passed, and a fifth of one since the last line. */
bool cli_progress_due(const cli_progress *p, uint64_t now_ns);
/* Formats "saving  312.0 MiB of 1.2 GiB  26 %  410.0 MiB/s  2 s left"; total 0: unknown. */
void cli_progress_line(char *to, size_t size, const cli_progress *p, uint64_t done, uint64_t total,
                       uint64_t now_ns);

/*
 * From now on the first of these signals is only recorded. Long operations check cli_interrupted(), remove what they
 * have written, and the command exits with 128 + the signal. A second signal kills. Signals that were ignored (nohup)
 * stay ignored.
 */
void cli_interrupt_catch(void);
/* Returns the signal that asked to stop, or 0. */
int cli_interrupted(void);

#endif

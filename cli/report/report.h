/* The interface of cli/report/ for other rooms. README.md has an overview. */
#ifndef CLI_REPORT_REPORT_H
#define CLI_REPORT_REPORT_H

#include "cli/output/output.h"
#include "cli/report/prices.h"

/* Retention rules as options: of prune, which applies them, and of policy, which stores them. */

/* --run, --keep-...; input: a ckd_policy initialised with CKD_POLICY_INIT. */
extern const struct argp cli_policy_argp;
#define CLI_KEEP_OPTIONS                                                                                \
    "--keep-last, --keep-every, --keep-first, --keep-best, --keep-newer, --keep-within, --keep-daily, " \
    "--keep-weekly, --keep-monthly, --keep-tag"
/* Does the policy keep anything? Ends the process if an option qualifies a rule that is absent. */
bool cli_policy_given(const ckd_policy *policy, struct argp_state *state);
/* "the last 5, multiples of 10000" */
typedef struct cli_policy_text {
    char text[400];
} cli_policy_text;
cli_policy_text cli_policy_words(const ckd_policy *policy);

/* Data that `report` adds to the library's sums: growth, cost, savings by a policy, a projection of the run's end. */

/*
 * Growth of a run, from its newest checkpoints (at most 32) and the distances between them. NaN: unknown, there is only
 * one.
 */
typedef struct report_growth {
    const ckd_usage *run;
    const ckd_checkpoint *first, *last;
    double interval; /* steps between checkpoints */
    /* seconds between checkpoints; NaN also if their clocks stood still */
    double seconds;
    double raw, stored;                       /* mean bytes per checkpoint */
    uint64_t over;                            /* number of checkpoints in the means */
    ckd_role_bytes roles[CKD_ROLE_OTHER + 1]; /* sums over these checkpoints, by role */
} report_growth;

/* A run at the requested step if it continues as before. Only for runs with a growth. */
typedef struct report_projection {
    const report_growth *growth;
    uint64_t until, more;             /* the step; checkpoints to come */
    uint64_t raw_bytes, stored_bytes; /* of the whole run at that step */
    uint64_t reached_ns;              /* 0: unknown */
} report_projection;

/* Everything saved in one day or month, UTC. */
typedef struct report_period {
    char label[16]; /* "2026-01-31", "2026-01" */
    uint64_t checkpoints, raw_bytes, stored_bytes;
    uint64_t raw_so_far, stored_so_far; /* running totals */
} report_period;

/* Cost of loading a run's newest checkpoint from storage that charges for reads. */
typedef struct report_loading {
    const ckd_checkpoint *checkpoint;
    uint64_t bytes, files;
    double cost; /* NaN: neither requests nor egress have a price */
} report_loading;

/* How many bits the layers of a run take, for some of its checkpoints. */
typedef struct report_layers {
    const report_growth *growth;
    size_t columns, rows;
    size_t *checkpoints; /* of each column: index into by_checkpoint */
    char **names;        /* of each row */
    double *bits;        /* stored bits per element of weights, by row, then column; NaN: none */
} report_layers;

/* Only the page has these figures: they need the tensors of checkpoints. */
typedef struct report_details {
    cli_marks marks;
    report_layers *layers; /* one per shown run */
    size_t layers_count;
    const char *metric; /* name of the one that the newest checkpoint with a metric has; NULL: none */
    double *
        weight_error; /* one per checkpoint: largest relative L2 error of a weight; NaN: exact, or not read */
} report_details;

/* How an attempt of `ckptdelta run` ended. */
typedef enum life_end {
    LIFE_RUNNING = 0, /* or its supervisor has died, and none has followed */
    LIFE_DONE = 1,
    LIFE_STOPPED = 2,   /* a signal asked the supervisor to stop */
    LIFE_FAILED = 3,    /* of itself */
    LIFE_HUNG = 4,      /* ended because it stood still */
    LIFE_UNHEALTHY = 5, /* ended because of a suspect checkpoint or an alarm */
    LIFE_LOST = 6       /* its supervisor died */
} life_end;
#define LIFE_ENDS 7

/* An attempt, as much as is kept of it. */
typedef struct life_attempt {
    char *run;
    char *reason, *verdict; /* how it ended, and what the supervisor did then; "": not known */
    char *hosts;            /* shortened; "": not known */
    uint64_t number;
    life_end end;
    uint64_t begin_ns, end_ns;      /* since 1970; end_ns of one that runs is 0 */
    uint64_t resume_ns, trained_ns; /* from its start to its first step, and from there to its last one */
    uint64_t from_step;             /* of the checkpoint that it started from; CKD_LATEST: none */
    uint64_t first, last;           /* steps that its processes reported; CKD_LATEST: not known */
    uint64_t kept; /* no later attempt started from an earlier step than this; CKD_LATEST: none */
} life_attempt;

typedef struct life_save {
    uint64_t step, created_ns;
    bool suspect;
} life_save;

/* A run that `ckptdelta run` supervised. */
typedef struct report_life {
    const life_attempt *attempts; /* in the order of their starts */
    size_t count;
    life_save *saves; /* of the run and its branches, by time; also deleted ones whose times are recorded */
    size_t save_count, suspects;
    size_t reported; /* attempts whose processes reported steps */
    /* from the first start to the last end; if the last attempt is running, to its newest save */
    uint64_t begin_ns, end_ns;
    double useful_s;     /* see docs/run.md, as for goodput; NaN: not known */
    double resume_s;     /* median of the attempts that started from a checkpoint; NaN: not known */
    uint64_t steps_lost; /* steps that were made and had to be made again */
} report_life;

/* The journal, read once. */
typedef struct report_lives {
    life_attempt *attempts; /* by run */
    size_t count, left_out; /* the first ones of a long journal are left out */
    report_life *items;     /* one per run, those with most attempts first */
    size_t life_count;
} report_lives;

/* The runs whose curves are drawn: those with most checkpoints. Indexes into by_run, in its order. */
typedef struct report_shown {
    size_t runs[HTML_SERIES_MAX];
    size_t count;
} report_shown;

typedef struct report_data {
    ckd_report *report;
    const char *store;
    size_t *by_time;         /* indexes into by_checkpoint, by time */
    size_t *by_size;         /* indexes into by_tensor, largest first */
    uint64_t *role_elements; /* one per row of by_role */
    report_growth *growths;  /* one per run */
    report_projection *projections;
    report_period *periods;
    report_loading *loadings; /* one per run, if there are prices */
    size_t projection_count, period_count, loading_count;
    uint64_t *written;      /* one per checkpoint: bytes that its save wrote; 0: not known */
    ckd_timeline *timeline; /* recorded save durations, by time */
    report_details details;
    report_lives lives;
    ckd_prune *prune;   /* NULL: no policy was given, and none is stored */
    bool stored;        /* `prune` is about the stored policies */
    ckd_trash *trash;   /* NULL: unreadable */
    cli_prices *prices; /* NULL: no table was given */
} report_data;

typedef struct report_query {
    const char *store;
    ckd_policy policy;
    bool prune; /* report savings of this policy, else those of the stored ones; its run always counts */
    const char *prices; /* file; NULL: none */
    uint64_t until;
    bool project;
    bool details; /* read what only the page shows */
} report_query;

/*
 * Collects the data. Release with report_data_free, also after a failure. Errors: those of ckd_store_report,
 * ckd_store_plan_prune, cli_prices_read.
 */
ckd_status report_data_make(report_data *out, const report_query *query, ckd_store *store, ckd_error *err);
void report_data_free(report_data *d);

/* Reads the details. Checkpoints that cannot be read have none. Errors: NOMEM, IO of pins and tags. */
ckd_status report_details_read(report_data *d, ckd_store *store, ckd_error *err);
void report_details_free(report_details *details);
report_shown report_shown_runs(const report_data *d);

/*
 * Reads the journal of `ckptdelta run`; the timeline must be there. A journal that cannot be read is noted and left out.
 * Errors: NOMEM.
 */
ckd_status report_lives_read(report_data *d, ckd_error *err);
void report_lives_free(report_lives *lives);
/* Returns the share of useful time in the whole; NaN: not known. */
double report_goodput(const report_life *life);
/* "failed" */
const char *report_life_end_name(life_end end);

/* Returns the request cost of uploading all files once; NaN: no price. */
double report_upload_cost(const report_data *d);
/* Sums over the checkpoints of which it is known how many bytes their saves wrote. */
typedef struct report_writing {
    uint64_t checkpoints, written_bytes, stored_bytes;
} report_writing;
report_writing report_written(const report_data *d);
/* Returns stored bits per element; NaN if there are no elements. */
double report_bits(uint64_t stored, uint64_t elements);
/*
 * Returns how many full checkpoints, as large as the newest ones, would fit in the store's size; NaN if there are none.
 */
double report_full_instead(const report_data *d);

/* ---- output ---- */
ckd_status report_print_json(const report_data *d, ckd_error *err);
void report_print_csv(const report_data *d);
/* The first line: what the store saves against full copies. */
void report_say_saved(FILE *to, const report_data *d);
/* projected: a step was given. */
ckd_status report_print_text(const report_data *d, bool projected, bool verbose, ckd_error *err);
/* Makes one self-contained page. malloc'ed; NULL if out of memory, or err says why. */
char *report_html(const report_data *d, size_t *size, ckd_error *err);

/*
 * Pages and pictures begin with marks. A file with the same mark is replaced, another one only with `force`: EXISTS.
 * "-" is standard output.
 */
ckd_status report_file_check(const char *path, const char *mark, bool force, ckd_error *err);
/* Writes the file and frees `text`. Prints `wrote PATH` if `talks`. */
ckd_status report_file_write(const char *path, char *text, size_t size, bool talks, ckd_error *err);

/* Saves over time as a picture: one lane per run, or per rank of a run. */

/* A save and its ranks' stages; none if an older version made the save. */
typedef struct timeline_save {
    const ckd_save_times *times;
    const ckd_stage_times *stages; /* by rank, then stage */
    size_t stage_count;
} timeline_save;

#define SVG_MARK "<!-- ckptdelta -->\n<svg "
/*
 * Makes a self-contained SVG, readable in light and dark mode. malloc'ed; NULL if out of memory. `saves` is sorted by
 * time.
 */
char *cli_timeline_svg(const timeline_save *saves, size_t count, size_t *size);

#endif

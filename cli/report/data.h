/* What `report` tells beyond the library's sums: growth, cost, what a policy would save, the end of the run. */
#ifndef CLI_REPORT_DATA_H
#define CLI_REPORT_DATA_H

#include "cli/report/policies.h"
#include "cli/report/prices.h"

/* How a run grows: over its newest checkpoints, at most 32, by the distances between them. NaN: not known, it has only one. */
typedef struct report_growth {
    const ckd_usage *run;
    const ckd_checkpoint *first, *last;
    double interval;                          /* steps from one to the next */
    double seconds;                           /* the same in time; NaN also if their clocks stood still */
    double raw, stored;                       /* bytes of one, mean */
    uint64_t over;                            /* that the means are over */
    ckd_role_bytes roles[CKD_ROLE_OTHER + 1]; /* sums over these checkpoints, by role */
} report_growth;

/* A run at the step asked for, if it goes on as it does. Only of runs with a growth. */
typedef struct report_projection {
    const report_growth *growth;
    uint64_t until, more;             /* step; checkpoints to come */
    uint64_t raw_bytes, stored_bytes; /* of the whole run, then */
    uint64_t reached_ns;              /* 0: not known */
} report_projection;

/* All that was saved in one day or month, UTC. */
typedef struct report_period {
    char label[16]; /* "2026-01-31", "2026-01" */
    uint64_t checkpoints, raw_bytes, stored_bytes;
    uint64_t raw_so_far, stored_so_far; /* what is there of all up to then */
} report_period;

/* What it takes to load the newest checkpoint of a run from where each read costs. */
typedef struct report_loading {
    const ckd_checkpoint *checkpoint;
    uint64_t bytes, files;
    double cost; /* NaN: neither requests nor egress have a price */
} report_loading;

typedef struct report_data {
    ckd_report *report;
    const char *store;
    size_t *by_time;         /* numbers of by_checkpoint, by time */
    size_t *by_size;         /* numbers of by_tensor, the largest first */
    uint64_t *role_elements; /* of each row of by_role */
    report_growth *growths;  /* of each run */
    report_projection *projections;
    report_period *periods;
    report_loading *loadings; /* of each run, with prices */
    size_t projection_count, period_count, loading_count;
    ckd_timeline *timeline; /* how long saves took, those that the catalog knows of, by time */
    ckd_prune *prune;       /* NULL: no policy was asked about, and none is stored */
    bool stored;            /* the stored policies' */
    ckd_trash *trash;       /* NULL: it cannot be read */
    cli_prices *prices;     /* NULL: no table was given */
} report_data;

typedef struct report_question {
    const char *store;
    ckd_policy policy;
    bool prune; /* say what it would save; else what the stored ones would; its run counts in any case */
    const char *prices; /* file; NULL: none */
    uint64_t until;
    bool project;
} report_question;

/* Errors: those of ckd_store_report, ckd_store_plan_prune, cli_prices_read. Release with report_data_free, also after a failure. */
ckd_status report_data_make(report_data *out, const report_question *question, ckd_store *store,
                            ckd_error *err);
void report_data_free(report_data *d);

/* What uploading all files once costs in requests; NaN: not priced. */
double report_upload_cost(const report_data *d);
/* Stored bits for each element; NaN: there is none. */
double report_bits(uint64_t stored, uint64_t elements);
/* How many checkpoints as large as the newest ones would fit into what the store takes; NaN: there are none. */
double report_full_instead(const report_data *d);

/* ---- what is printed ---- */
ckd_status report_print_json(const report_data *d, ckd_error *err);
void report_print_csv(const report_data *d);
/* projected: a step was asked for. */
ckd_status report_print_text(const report_data *d, bool projected, bool verbose, ckd_error *err);
/* One page without anything outside of it. Replaces the file if it is such a page. */
ckd_status report_write_html(const report_data *d, const char *path, ckd_error *err);
/* Whether it could: EXISTS if something else is there. */
ckd_status report_check_html(const char *path, ckd_error *err);

#endif

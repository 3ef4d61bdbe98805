/* report --csv: one table, with a row for each group. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/report/report.h"
#include "cli/output/output.h"

/* Prints a cell as in RFC 4180. A spreadsheet would run text that starts with one of these characters as a formula. */
static void print_text_cell(const char *raw) {
    char *clean = cli_clean_but(raw, "\t\r\n");
    const char *text = clean ? clean : "(out of memory)";
    bool quoted = strpbrk(text, ",\"\t\r\n") != NULL;
    if (quoted) {
        putchar('"');
    }
    if (*text && strchr("=+-@\t\r", *text)) {
        putchar('\'');
    }
    for (const char *c = text; *c; c++) {
        if (*c == '"') {
            putchar('"');
        }
        putchar(*c);
    }
    if (quoted) {
        putchar('"');
    }
    free(clean);
}

typedef struct csv_row {
    const char *group, *run, *name, *time, *kind, *fidelity; /* NULL: an empty cell */
    uint64_t checkpoints, raw, stored;
    const uint64_t *step, *elements; /* NULL: empty cells */
    bool monthly;                    /* `stored` has a monthly cost, if there are prices */
} csv_row;
#define BYTES(u) .raw = (u)->raw_bytes, .stored = (u)->stored_bytes
#define USAGE(u) .checkpoints = (u)->checkpoints, BYTES(u)

static void print_number_cell(const uint64_t *number) {
    putchar(',');
    if (number) {
        printf("%" PRIu64, *number);
    }
}

static void print_row(const report_data *d, const csv_row *row) {
    const char *texts[] = {row->group, row->run, row->name, row->time, row->kind, row->fidelity};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        if (i) {
            putchar(',');
        }
        print_text_cell(texts[i] ? texts[i] : "");
    }
    print_number_cell(row->step);
    print_number_cell(&row->checkpoints);
    print_number_cell(row->elements);
    print_number_cell(&row->raw);
    print_number_cell(&row->stored);
    putchar(',');
    if (d->prices && row->monthly) {
        printf("%.17g", cli_price_stored(d->prices, row->stored));
    }
    putchar(',');
    if (d->prices && row->monthly) {
        print_text_cell(d->prices->currency);
    }
    fputs("\r\n", stdout);
}

static void print_totals(const report_data *d) {
    const ckd_report *r = d->report;
    csv_row total = {.group = "total", .checkpoints = r->checkpoint_count, BYTES(r), .monthly = true};
    print_row(d, &total);
    const struct {
        const char *name;
        uint64_t bytes;
    } parts[] = {{"chunk files", r->chunk_bytes}, {"manifests", r->manifest_bytes},
                 {"catalog", r->catalog_bytes},   {"materialized", r->materialized_bytes},
                 {"parity", r->parity_bytes},     {"other", r->other_bytes},
                 {"unlisted", r->unlisted_bytes}};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        print_row(
            d, &(csv_row){.group = "part", .name = parts[i].name, .stored = parts[i].bytes, .monthly = true});
    }
}

static void print_usages(const report_data *d) {
    const ckd_report *r = d->report;
    for (size_t i = 0; i < r->run_count; i++) {
        const ckd_usage *u = &r->by_run[i];
        print_row(d, &(csv_row){.group = "run", .run = u->name, USAGE(u), .monthly = true});
    }
    for (size_t i = 0; i < r->role_count; i++) {
        const ckd_usage *u = &r->by_role[i];
        print_row(d, &(csv_row){.group = "role",
                                .name = u->name,
                                USAGE(u),
                                .elements = &d->role_elements[i],
                                .monthly = true});
    }
    for (size_t i = 0; i < r->fidelity_count; i++) {
        const ckd_usage *u = &r->by_fidelity[i];
        print_row(d, &(csv_row){.group = "fidelity", .fidelity = u->name, USAGE(u), .monthly = true});
    }
    for (size_t i = 0; i < d->period_count; i++) {
        const report_period *p = &d->periods[i];
        print_row(d, &(csv_row){.group = "time", .time = p->label, USAGE(p)});
    }
    for (size_t i = 0; i < r->tensor_count; i++) {
        const ckd_tensor_usage *t = &r->by_tensor[d->by_size[i]];
        print_row(d, &(csv_row){.group = "tensor",
                                .run = t->run,
                                .name = t->name,
                                .kind = ckd_role_name(t->role),
                                USAGE(t),
                                .elements = &t->elements});
    }
}

static void print_checkpoints(const report_data *d) {
    const ckd_report *r = d->report;
    for (size_t i = 0; i < r->checkpoint_count; i++) {
        const ckd_checkpoint *c = &r->by_checkpoint[i];
        cli_text created = cli_text_time(c->created_ns);
        csv_row row = {.group = "checkpoint",
                       .run = c->run,
                       .time = created.text,
                       .kind = ckd_kind_name(c->kind),
                       .fidelity = ckd_fidelity_name(c->fidelity),
                       .step = &c->step,
                       .checkpoints = 1,
                       BYTES(c),
                       .monthly = true};
        print_row(d, &row);
        for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
            const ckd_role_bytes *b = &r->roles[i].roles[role];
            if (b->elements || b->stored_bytes) {
                print_row(d, &(csv_row){.group = "checkpoint role",
                                        .run = c->run,
                                        .name = ckd_role_name(role),
                                        .time = created.text,
                                        .step = &c->step,
                                        .checkpoints = 1,
                                        .elements = &b->elements,
                                        BYTES(b)});
            }
        }
    }
}

/* Prints the total size of the runs' newest checkpoints. */
static void print_growths(const report_data *d) {
    for (size_t i = 0; i < d->report->run_count; i++) {
        const report_growth *g = &d->growths[i];
        double over = (double)g->over;
        print_row(d, &(csv_row){.group = "growth",
                                .run = g->run->name,
                                .checkpoints = g->over,
                                .raw = (uint64_t)(g->raw * over + 0.5),
                                .stored = (uint64_t)(g->stored * over + 0.5)});
        for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
            const ckd_role_bytes *b = &g->roles[role];
            if (b->elements || b->stored_bytes) {
                print_row(d, &(csv_row){.group = "growth",
                                        .run = g->run->name,
                                        .name = ckd_role_name(role),
                                        .checkpoints = g->over,
                                        .elements = &b->elements,
                                        BYTES(b)});
            }
        }
    }
}

static void print_outlooks(const report_data *d) {
    for (size_t i = 0; i < d->projection_count; i++) {
        const report_projection *p = &d->projections[i];
        cli_text reached = cli_text_time(p->reached_ns);
        print_row(d, &(csv_row){.group = "projection",
                                .run = p->growth->run->name,
                                .time = p->reached_ns ? reached.text : NULL,
                                .step = &p->until,
                                .checkpoints = p->growth->run->checkpoints + p->more,
                                BYTES(p),
                                .monthly = true});
    }
    if (d->prune) {
        print_row(d, &(csv_row){.group = "pruning",
                                .checkpoints = d->prune->deleted,
                                .stored = d->prune->bytes,
                                .monthly = true});
    }
    if (d->trash) {
        print_row(d, &(csv_row){.group = "trash",
                                .checkpoints = d->trash->count,
                                .stored = d->trash->file_bytes,
                                .monthly = true});
    }
}

void report_print_csv(const report_data *d) {
    fputs("group,run,name,time,kind,fidelity,step,checkpoints,elements,raw_bytes,stored_bytes,cost_per_month,"
          "currency\r\n",
          stdout);
    print_totals(d);
    print_usages(d);
    print_growths(d);
    print_outlooks(d);
    print_checkpoints(d);
}

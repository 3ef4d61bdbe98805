#include "engine/retain/calendar.h"

#include <stdlib.h>
#include <time.h>

/* Numbers of periods in UTC. They grow with time. */
typedef uint64_t (*period_fn)(uint64_t seconds);

static uint64_t day_of(uint64_t seconds) {
    return seconds / (24 * 3600);
}

/* 1 January 1970 was a Thursday. */
static uint64_t week_of(uint64_t seconds) {
    return (day_of(seconds) + 3) / 7;
}

static uint64_t month_of(uint64_t seconds) {
    time_t time = (time_t)seconds;
    struct tm utc;
    return gmtime_r(&time, &utc) ? (uint64_t)utc.tm_year * 12 + (uint64_t)utc.tm_mon : 0;
}

typedef struct dated {
    uint64_t period;
    size_t index; /* of the checkpoint, by step */
} dated;

/* The newest period first, and in it the highest step. */
static int compare(const void *a, const void *b) {
    const dated *x = a, *y = b;
    if (x->period != y->period) {
        return x->period < y->period ? 1 : -1;
    }
    return (x->index < y->index) - (x->index > y->index);
}

static void keep_newest(ckd_retained *items, dated *order, size_t count, period_fn period_of,
                        uint32_t periods, unsigned why) {
    for (size_t i = 0; i < count; i++) {
        order[i] = (dated){period_of(items[i].checkpoint.created_ns / UINT64_C(1000000000)), i};
    }
    qsort(order, count, sizeof(*order), compare);
    uint32_t kept = 0;
    for (size_t i = 0; i < count && kept < periods; i++) {
        if (i == 0 || order[i].period != order[i - 1].period) {
            items[order[i].index].kept |= why;
            kept++;
        }
    }
}

ckd_status calendar_keep(ckd_retained *items, size_t count, const ckd_policy *p, ckd_error *err) {
    if (!p->keep_daily && !p->keep_weekly && !p->keep_monthly) {
        return CKD_OK;
    }
    dated *order = malloc((count + 1) * sizeof(*order));
    if (!order) {
        return err_nomem(err, count * sizeof(*order), "the periods of checkpoints");
    }
    keep_newest(items, order, count, day_of, p->keep_daily, CKD_KEPT_DAILY);
    keep_newest(items, order, count, week_of, p->keep_weekly, CKD_KEPT_WEEKLY);
    keep_newest(items, order, count, month_of, p->keep_monthly, CKD_KEPT_MONTHLY);
    free(order);
    return CKD_OK;
}

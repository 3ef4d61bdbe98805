/* Queries how long saves took. */
#include <stdlib.h>

#include "engine/store/store.h"

typedef struct timing_query {
    ckd_timeline *timeline;
    const char *run;
} timing_query;

static ckd_status ask(void *context, catalog *c, ckd_error *err) {
    timing_query *q = context;
    return catalog_timings(q->timeline, c, q->run, err);
}

ckd_status ckd_store_timeline(ckd_timeline **out, ckd_store *store, const char *run, ckd_error *err) {
    *out = NULL;
    ckd_timeline *timeline = calloc(1, sizeof(*timeline));
    if (!timeline) {
        return err_nomem(err, sizeof(*timeline), "a timeline");
    }
    timing_query question = {timeline, run};
    ckd_status status = store_query(store, ask, &question, err);
    if (status != CKD_OK) {
        free(timeline);
        return status;
    }
    *out = timeline;
    return CKD_OK;
}

void ckd_timeline_free(ckd_timeline *timeline) {
    if (timeline) {
        free(timeline->items);
        free(timeline->stages);
        free(timeline);
    }
}

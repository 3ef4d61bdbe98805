#include "engine/common/pace.h"

#include "base/file.h"

#define NAP_NS UINT64_C(100000000) /* at most, between two looks at what the caller wants */

static ckd_status tell(const pace *p, ckd_error *err) {
    uint64_t total = p->total > p->done ? p->total : p->done;
    int stop = p->on_progress ? p->on_progress(p->context, p->done, total) : 0;
    return stop ? err_set(err, CKD_E_CANCELLED, "%s was cancelled", p->what) : CKD_OK;
}

ckd_status pace_add(pace *p, uint64_t count, ckd_error *err) {
    p->done += count;
    ckd_status status = tell(p, err);
    double rate = (double)p->bytes_per_s;
    uint64_t until = rate > 0 ? p->begun_ns + (uint64_t)((double)p->done / rate * 1e9) : 0;
    for (uint64_t now = clock_monotonic_ns(); now < until && status == CKD_OK; now = clock_monotonic_ns()) {
        clock_sleep_ns(until - now < NAP_NS ? until - now : NAP_NS);
        status = tell(p, err);
    }
    return status;
}

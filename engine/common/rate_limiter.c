/*
 * Limits the rate of background work, and reports its progress. Waits are cut into naps, so a cancellation takes effect
 * soon.
 */
#include "engine/common/common.h"

#include "base/file.h"

#define NAP_NS UINT64_C(100000000) /* longest sleep between two calls of `report` */

ckd_status rate_wait(uint64_t bytes_per_s, uint64_t begun_ns, uint64_t byte_count, rate_report_fn report,
                     void *context, ckd_error *err) {
    ckd_status status = report(context, err);
    double rate = (double)bytes_per_s;
    uint64_t until = rate > 0 ? begun_ns + (uint64_t)((double)byte_count / rate * 1e9) : 0;
    for (uint64_t now = clock_monotonic_ns(); now < until && status == CKD_OK; now = clock_monotonic_ns()) {
        clock_sleep_ns(until - now < NAP_NS ? until - now : NAP_NS);
        status = report(context, err);
    }
    return status;
}

static ckd_status report_progress(void *context, ckd_error *err) {
    const rate_limiter *p = context;
    uint64_t total = p->total > p->done ? p->total : p->done;
    int stop = p->on_progress ? p->on_progress(p->context, p->done, total) : 0;
    return stop ? err_set(err, CKD_E_CANCELLED, "%s", p->cancelled) : CKD_OK;
}

ckd_status rate_limiter_add(rate_limiter *p, uint64_t count, ckd_error *err) {
    p->done += count;
    return rate_wait(p->bytes_per_s, p->begun_ns, p->done, report_progress, p, err);
}

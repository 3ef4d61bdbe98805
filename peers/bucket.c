/*
 * When blobs may be sent. A limit of bytes per second: a bucket that fills steadily and holds a tenth of a second. And
 * not while training is busy, within limits.
 */
#include "peers/internal.h"

#include "base/file.h"
#include "base/local_socket.h"

#define BURST_S  0.1
#define PAUSE_MS 20
#define BUSY_NS \
    UINT64_C(100000000) /* for which a packet waits at most: training may never say that it is idle */
#define LOOK_MS 2

void bucket_init(bucket *b, const peer_options *options, int stop) {
    *b = (bucket){.bytes_per_s = options->bytes_per_s,
                  .tokens = (double)options->bytes_per_s * BURST_S,
                  .filled_ns = clock_monotonic_ns(),
                  .stop = stop,
                  .is_busy = options->is_busy,
                  .context = options->context};
    pthread_mutex_init(&b->mutex, NULL);
}

/* A packet may be larger than the bucket: it is taken when the bucket is not in debt, and leaves the debt behind. */
static bool take(bucket *b, uint64_t size) {
    pthread_mutex_lock(&b->mutex);
    uint64_t now_ns = clock_monotonic_ns();
    double max = (double)b->bytes_per_s * BURST_S;
    b->tokens += (double)(now_ns - b->filled_ns) * 1e-9 * (double)b->bytes_per_s;
    b->tokens = b->tokens < max ? b->tokens : max;
    b->filled_ns = now_ns;
    bool taken = b->tokens > 0;
    b->tokens -= taken ? (double)size : 0;
    pthread_mutex_unlock(&b->mutex);
    return taken;
}

static void wait_while_busy(bucket *b) {
    uint64_t until_ns = clock_monotonic_ns() + BUSY_NS;
    bool stops = false;
    while (b->is_busy && !stops && !atomic_load(&b->closed) && b->is_busy(b->context) &&
           clock_monotonic_ns() < until_ns) {
        local_wait(&b->stop, 1, LOOK_MS, &stops);
    }
}

ckd_status bucket_take(bucket *b, uint64_t size, ckd_error *err) {
    wait_while_busy(b);
    bool stops = atomic_load(&b->closed);
    while (!stops && b->bytes_per_s && !take(b, size)) {
        local_wait(&b->stop, 1, PAUSE_MS, &stops);
        stops |= atomic_load(&b->closed);
    }
    return stops ? err_set(err, CKD_E_CANCELLED, "the agent is ending") : CKD_OK;
}

void bucket_close(bucket *b) {
    atomic_store(&b->closed, true);
}

void bucket_destroy(bucket *b) {
    pthread_mutex_destroy(&b->mutex);
}

/* The limit of bytes per second: a bucket that fills steadily and holds a tenth of a second. */
#include "peers/internal.h"

#include "base/file.h"
#include "base/local_socket.h"

#define BURST_S  0.1
#define PAUSE_MS 20

void bucket_init(bucket *b, uint64_t bytes_per_s, int stop) {
    *b = (bucket){.bytes_per_s = bytes_per_s,
                  .tokens = (double)bytes_per_s * BURST_S,
                  .filled_ns = clock_monotonic_ns(),
                  .stop = stop};
    pthread_mutex_init(&b->mutex, NULL);
}

/* A piece may be larger than the bucket: it is taken when the bucket is not in debt, and leaves the debt behind. */
static bool take(bucket *b, uint64_t size) {
    pthread_mutex_lock(&b->mutex);
    uint64_t now_ns = clock_monotonic_ns();
    double most = (double)b->bytes_per_s * BURST_S;
    b->tokens += (double)(now_ns - b->filled_ns) * 1e-9 * (double)b->bytes_per_s;
    b->tokens = b->tokens < most ? b->tokens : most;
    b->filled_ns = now_ns;
    bool taken = b->tokens > 0;
    b->tokens -= taken ? (double)size : 0;
    pthread_mutex_unlock(&b->mutex);
    return taken;
}

ckd_status bucket_take(bucket *b, uint64_t size, ckd_error *err) {
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

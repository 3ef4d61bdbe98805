/*
 * adaptive_decode and adaptive_plane_decode from any bytes. They must stay within their buffers, which have
 * the exact size. Accepted streams must survive being coded again. Their bytes are then the same, except for
 * planes, whose mode and density the encoder chooses. The first four bytes select the kind, columns, contexts
 * or hints, and the count.
 */
#include <stdlib.h>
#include <string.h>

#include "codec/entropy/entropy.h"
#include "tests/support/fuzz.h"

static adaptive_scratch models;

#define HEADER    4
#define MOST_EACH 4096

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

static void *exactly(const void *from, size_t size) {
    void *copy = malloc(size ? size : 1);
    require(copy != NULL);
    memcpy(copy, from, size);
    return copy;
}

static void values(const uint8_t *stream, size_t size, size_t n, const uint8_t *contexts, int32_t *out) {
    ckd_status status = adaptive_decode(out, &(adaptive_sequence){n, contexts}, stream, size, &models, NULL);
    require(status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
    if (status == CKD_OK && n) {
        bytes even = {0}, scaled = {0};
        adaptive_encode(&even, ADAPTIVE_EVEN, &(adaptive_sequence){n, contexts}, out, &models);
        adaptive_encode(&scaled, ADAPTIVE_SCALED, &(adaptive_sequence){n, contexts}, out, &models);
        require(!even.failed && !scaled.failed);
        require((even.size == size && memcmp(even.data, stream, size) == 0) ||
                (scaled.size == size && memcmp(scaled.data, stream, size) == 0));
        bytes_free(&even);
        bytes_free(&scaled);
    }
}

static void plane(const uint8_t *stream, size_t size, const adaptive_plane *p, int32_t *out) {
    ckd_status status = adaptive_plane_decode(out, p, stream, size, &models, NULL);
    require(status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
    if (status == CKD_OK && p->count) {
        bytes again = {0};
        int32_t *back = malloc(p->count * sizeof(*back));
        require(back != NULL);
        adaptive_plane_encode(&again, p, out, &models);
        require(!again.failed &&
                adaptive_plane_decode(back, p, again.data, again.size, &models, NULL) == CKD_OK);
        require(memcmp(back, out, p->count * sizeof(*back)) == 0);
        free(back);
        bytes_free(&again);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < HEADER) {
        return 0;
    }
    size_t n = (data[2] | (size_t)data[3] << 8) % MOST_EACH;
    uint8_t *extra = malloc(n + 1);
    int32_t *zeros = calloc(n + 1, sizeof(*zeros));
    require(extra && zeros);
    for (size_t i = 0; i < n; i++) {
        extra[i] = (uint8_t)(i * (data[0] >> 2));
    }
    uint8_t *stream = exactly(data + HEADER, size - HEADER);
    int32_t *out = exactly(zeros, n * sizeof(*zeros));
    const uint8_t *used = data[0] & 2 ? extra : NULL;
    if (data[0] & 1) {
        adaptive_plane p = {n, 1u + data[1], data[0] % (1u + data[1]), used};
        plane(stream, size - HEADER, &p, out);
    } else {
        values(stream, size - HEADER, n, used, out);
    }
    free(out);
    free(stream);
    free(zeros);
    free(extra);
    return 0;
}

#include <stdlib.h>

#include "bench/ranks/ranks.h"

enum { ROWS = 4096, COLUMNS = 1024, KINDS = 3 };

/* In the order in which they are saved. */
static const char *const kinds[KINDS] = {"exp_avg_sq.", "exp_avg.", ""};

typedef struct source {
    unsigned kind;
    uint64_t tensor, step, first; /* first: element of the tensor at which the rank's rows begin */
} source;

struct ranks_state {
    size_t count;
    uint64_t shape[2];
    ckd_tensor *tensors;
    source *sources;
    char (*names)[64];
};

/* splitmix64 */
static uint64_t noise(uint64_t x) {
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* About normal, of variance 1: four uniform numbers. */
static float normal(uint64_t x) {
    uint64_t n = noise(x);
    int sum = (int)(n & 0xffff) + (int)(n >> 16 & 0xffff) + (int)(n >> 32 & 0xffff) + (int)(n >> 48);
    return (float)(sum - 2 * 65535) * (1.7320508f / 65536);
}

static float value_of(const source *s, uint64_t element) {
    uint64_t id = s->tensor << 40 | element, now = id ^ (s->step + 1) << 56;
    float own = normal(id), moved = normal(now);
    switch (s->kind) {
    case 0: /* each row has its scale */
        return 1e-9f * (1 + 0.5f * normal(element / COLUMNS)) * (1 + 0.5f * normal(element / COLUMNS)) *
               (1 + own * own + 0.1f * moved * moved);
    case 1:
        return 1e-5f * (0.6f * own + 0.8f * moved);
    default:
        return 0.02f * own + 1e-4f * (float)s->step * normal(~id) + 3e-5f * moved;
    }
}

static ckd_status read_values(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    const source *s = context;
    float *out = to;
    (void)err;
    for (uint64_t i = 0; i < count; i++) {
        out[i] = value_of(s, s->first + first + i);
    }
    return CKD_OK;
}

ranks_state *ranks_state_of(unsigned matrices, uint64_t step, uint32_t rank, uint32_t world) {
    ranks_state *s = calloc(1, sizeof(*s));
    size_t count = (size_t)matrices * KINDS;
    ckd_tensor *t = calloc(count, sizeof(*t));
    source *sources = calloc(count, sizeof(*sources));
    char(*names)[64] = calloc(count, sizeof(*names));
    if (!s || !t || !sources || !names) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    *s = (ranks_state){count, {ROWS, COLUMNS}, t, sources, names};
    uint64_t first = (uint64_t)ROWS * rank / world, end = (uint64_t)ROWS * (rank + 1) / world;
    for (size_t i = 0; i < count; i++) {
        snprintf(names[i], sizeof(names[i]), "%slayers.%zu.weight", kinds[i % KINDS], i / KINDS);
        sources[i] = (source){(unsigned)(i % KINDS), i, step, first * COLUMNS};
        t[i] = (ckd_tensor)CKD_TENSOR_INIT;
        t[i].name = names[i];
        t[i].dtype = CKD_F32;
        t[i].ndim = 2;
        t[i].shape = s->shape;
        t[i].region =
            (ckd_region){.kind = CKD_REGION_BOX, .offsets = {first, 0}, .lengths = {end - first, COLUMNS}};
        t[i].read = read_values;
        t[i].read_context = &sources[i];
    }
    return s;
}

const ckd_tensor *ranks_state_tensors(size_t *count, const ranks_state *s) {
    *count = s->count;
    return s->tensors;
}

void ranks_state_free(ranks_state *s) {
    free(s->tensors);
    free(s->sources);
    free(s->names);
    free(s);
}

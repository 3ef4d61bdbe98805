/* Finest symbols of integers, and their counts per context. */
#ifndef KERNELS_CUDA_SYMBOLS_H
#define KERNELS_CUDA_SYMBOLS_H

#include "kernels/cuda/launch.h"
#include "kernels/scalar.h"

#define CLASS_EACH 128u /* elements per thread; many, so that counters are seldom zeroed and added */
#define CLASS_ALL  (LAUNCH_THREADS * CLASS_EACH)
/* Contexts to count in shared memory, as many as fit. Others are counted in device memory. */
#define CLASS_WINDOW 40u
#define CLASS_ABOVE  12u /* of these, above the mean context; the tail of magnitudes is below it */

typedef struct class_arguments {
    const device_classes *all;
} class_arguments;

typedef struct class_shared {
    uint32_t count[CLASS_WINDOW][DEVICE_SYMBOLS];
    uint32_t seen[2]; /* sum of some contexts, and their number */
} class_shared;

typedef struct class_own {
    uint32_t first; /* first context of the window */
} class_own;

/* Integer i of an array of integers of `width` bytes. */
DEVICE_FN uint64_t integer_at(const void *from, uint32_t width, uint32_t i) {
    switch (width) {
    case 1:
        return ((const uint8_t *)from)[i];
    case 2:
        return ((const uint16_t *)from)[i];
    case 4:
        return ((const uint32_t *)from)[i];
    default:
        return ((const uint64_t *)from)[i];
    }
}

DEVICE_FN uint32_t size_of_magnitude(uint64_t magnitude, uint32_t fine) {
    if (magnitude >> fine == 0) {
        return (uint32_t)magnitude;
    }
    uint32_t length = scalar_bit_length(magnitude);
    return (length - fine) << fine | ((uint32_t)(magnitude >> (length - 1 - fine)) & ((1u << fine) - 1));
}

/* codec/FORMAT.md, "What symbols mean", CLASS. */
DEVICE_FN uint32_t class_of(uint64_t u, uint32_t bits, uint32_t fine) {
    uint64_t d = (uint64_t)((int64_t)(u << (65 - bits)) >> (65 - bits));
    bool changed = (u ^ d) >> (bits - 1) & 1, negative = d >> 63;
    uint32_t size = size_of_magnitude(negative ? UINT64_C(0) - d : d, fine);
    uint32_t symbol = size ? 2 * size - 1 + negative : 0;
    return (changed ? 255 - symbol : symbol) & 255u;
}

DEVICE_FN void class_begin(const place *at, const device_classes *c, class_shared *s) {
    for (uint32_t i = at->thread; i < CLASS_WINDOW * DEVICE_SYMBOLS; i += LAUNCH_THREADS) {
        s->count[i / DEVICE_SYMBOLS][i % DEVICE_SYMBOLS] = 0;
    }
    if (at->thread < 2) {
        s->seen[at->thread] = 0;
    }
    (void)c;
}

/* One element per thread estimates the mean context. The window only makes counting faster. */
DEVICE_FN void class_look(const place *at, const device_classes *c, class_shared *s) {
    uint64_t i = (uint64_t)at->block * CLASS_ALL + at->thread * CLASS_EACH;
    if (c->contexts && i < c->n) {
        add_u32(&s->seen[0], c->contexts[i]);
        add_u32(&s->seen[1], 1);
    }
}

DEVICE_FN uint32_t class_window(const class_shared *s) {
    uint32_t mean = s->seen[1] ? s->seen[0] / s->seen[1] : 0, end = mean + CLASS_ABOVE + 1;
    end = end > DEVICE_SYMBOLS ? DEVICE_SYMBOLS : end;
    return end > CLASS_WINDOW ? end - CLASS_WINDOW : 0;
}

DEVICE_FN void class_count(const place *at, const device_classes *c, class_shared *s, uint32_t window) {
    const uint32_t bits = 8 * c->width;
    const uint64_t mask = UINT64_MAX >> (64 - bits);
    for (uint32_t turn = 0; turn < CLASS_EACH; turn++) {
        uint64_t i = (uint64_t)at->block * CLASS_ALL + turn * LAUNCH_THREADS + at->thread;
        if (i >= c->n) {
            return;
        }
        uint64_t v = integer_at(c->integers, c->width, (uint32_t)i);
        uint32_t symbol = c->split ? (uint32_t)((v >> c->bits) - c->centre) & 255u
                                   : class_of((v - c->centre) & mask, bits, c->fine),
                 context = c->contexts ? c->contexts[i] : 0;
        c->symbols[i] = (uint8_t)symbol;
        if (context - window < CLASS_WINDOW) {
            add_u32(&s->count[context - window][symbol], 1);
        } else {
            add_u32(&c->counts[context * DEVICE_SYMBOLS + symbol], 1);
        }
    }
}

DEVICE_FN void count_classes(const place *at, const class_arguments *a, class_shared *s, class_own *own,
                             int phase) {
    const device_classes *c = &a->all[at->span];
    if ((uint64_t)at->block * CLASS_ALL >= c->n) {
        return;
    }
    if (phase == 0) {
        class_begin(at, c, s);
    } else if (phase == 1) {
        class_look(at, c, s);
    } else if (phase == 2) {
        own->first = class_window(s);
        class_count(at, c, s, own->first);
    } else {
        for (uint32_t i = at->thread; i < CLASS_WINDOW * DEVICE_SYMBOLS; i += LAUNCH_THREADS) {
            uint32_t n = s->count[i / DEVICE_SYMBOLS][i % DEVICE_SYMBOLS];
            if (n) {
                add_u32(&c->counts[own->first * DEVICE_SYMBOLS + i], n);
            }
        }
    }
}
/* A thread handles one counter. */
DEVICE_FN void list_counts(const place *at, const class_arguments *a) {
    const device_classes *c = &a->all[at->span];
    const uint32_t i = at->block * LAUNCH_THREADS + at->thread, max = (1u << DEVICE_ENTRY_BITS) - 1;
    if (!c->entries || i >= DEVICE_SYMBOLS * DEVICE_SYMBOLS) {
        return;
    }
    for (uint32_t left = c->counts[i]; left;) {
        uint32_t n = left < max ? left : max;
        uint64_t entry = count_u64(c->entered, 1);
        if (entry < c->capacity) {
            c->entries[entry] = i << DEVICE_ENTRY_BITS | n;
        }
        left -= n;
    }
}
KERNEL(list_counts, class_arguments)

KERNEL_IN_PHASES(count_classes, class_arguments, class_shared, class_own, 4)

#endif

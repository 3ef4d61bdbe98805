/*
 * Arrays in the memory of a device, with sentinels around them, for tests of a backend. Each file that
 * includes this has its own backend and queue.
 */
#ifndef TESTS_SUPPORT_DEVICE_ARRAYS_H
#define TESTS_SUPPORT_DEVICE_ARRAYS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "kernels/device.h"

#define UNUSED __attribute__((unused))

#define GUARD    64
#define SENTINEL 0xc3

static const device_backend *backend; /* the backend under test */
static device_queue queue;
static device_failure why;
static const kernels *cpu; /* the reference */

UNUSED static void must(device_result result) {
    if (result != DEVICE_DONE) {
        fail_msg("%s: %s", why.call, why.reason);
    }
}

/* ---- a group of tests ---- */

UNUSED static bool queue_opened(const char *name, const device_backend *of) {
    backend = of;
    cpu = kernels_cpu();
    if (backend->queue_open(&queue, 0, false, &why) != DEVICE_DONE) {
        printf("%s: %s: %s\n", name, why.call, why.reason);
        return false;
    }
    return true;
}

UNUSED static int queue_closed(int failed) {
    backend->queue_close(&queue);
    return failed;
}

/* Runs a group of tests with a queue of the backend. Returns how many failed. */
#define run_queue_tests(name, of, tests) \
    (queue_opened(name, of) ? queue_closed(cmocka_run_group_tests_name(name, tests, NULL, NULL)) : 1)

/* ---- memory ---- */

/*
 * n elements of device memory, `shift` elements after a multiple of 64 bytes, with sentinels around them; and
 * the same on the host.
 */
typedef struct array {
    uint8_t *all, *device, *host;
    size_t bytes, element;
} array;

UNUSED static array array_new(size_t n, size_t element, size_t shift) {
    array a = {.bytes = n * element, .element = element};
    size_t all = a.bytes + 2 * GUARD + shift * element;
    void *memory = NULL;
    must(backend->allocate(&memory, queue.device, all, &why));
    a.all = memory;
    a.device = a.all + GUARD + shift * element;
    a.host = malloc(a.bytes + 1);
    uint8_t *sentinels = malloc(all);
    assert_true(a.host && sentinels);
    memset(sentinels, SENTINEL, all);
    must(backend->copy(&queue, a.all, sentinels, all, DEVICE_TO_DEVICE, &why));
    must(backend->finish(&queue, &why));
    free(sentinels);
    memset(a.host, 0, a.bytes + 1);
    return a;
}

UNUSED static void array_give(const array *a) {
    must(backend->copy(&queue, a->device, a->host, a->bytes, DEVICE_TO_DEVICE, &why));
}

/* Copies the device's contents to `to`, and checks the sentinels. */
UNUSED static void array_take(const array *a, void *to) {
    size_t before = (size_t)(a->device - a->all), all = before + a->bytes + GUARD;
    uint8_t *copy = malloc(all);
    assert_non_null(copy);
    must(backend->copy(&queue, copy, a->all, all, DEVICE_TO_HOST, &why));
    must(backend->finish(&queue, &why));
    for (size_t i = 0; i < before; i++) {
        assert_int_equal(copy[i], SENTINEL);
    }
    for (size_t i = before + a->bytes; i < all; i++) {
        assert_int_equal(copy[i], SENTINEL);
    }
    memcpy(to, copy + before, a->bytes);
    free(copy);
}

UNUSED static void array_free(array *a) {
    backend->release(queue.device, a->all);
    free(a->host);
}

/* ---- values ---- */

static uint64_t seed = 1;
UNUSED static uint64_t next_random(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

/* Random bits. Many values are 0, infinite, NaN, denormal, or powers of two. */
UNUSED static void fill_bits(array *a) {
    for (size_t i = 0; i < a->bytes; i += a->element) {
        uint64_t bits = next_random();
        bits = next_random() % 4 ? bits : bits & (UINT64_MAX << next_random() % 64);
        bits = next_random() % 8 ? bits : (next_random() % 2 ? UINT64_MAX : 0) >> next_random() % 16;
        memcpy(a->host + i, &bits, a->element);
    }
}

#endif

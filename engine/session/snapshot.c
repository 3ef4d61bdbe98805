/*
 * Copies the trainer's data in host memory, cut into slices that any thread may take. So a fence can help with the copy
 * that it waits for.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/session/snapshot.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SLICE_BYTES \
    (UINT64_C(4) << 20) /* a millisecond or less: the longest wait of a fence for another group's slice */
#define PLACE_ALIGN 64
#define HUGE_PAGE   (UINT64_C(2) << 20)

static uint64_t place_after(uint64_t place, uint64_t length) {
    return (place + length + PLACE_ALIGN - 1) & ~(uint64_t)(PLACE_ALIGN - 1);
}

uint64_t snapshot_size(const snapshot_source *sources, size_t count) {
    uint64_t size = 0;
    for (size_t i = 0; i < count; i++) {
        size = place_after(size, sources[i].bytes);
    }
    return size;
}

static size_t slices_of(const snapshot_source *source) {
    return (size_t)((source->bytes + SLICE_BYTES - 1) / SLICE_BYTES);
}

static void cut_into_slices(snapshot *s) {
    snapshot_slice *p = s->slices;
    uint64_t place = 0;
    for (size_t i = 0; i < s->count; i++) {
        s->places[i] = place;
        place = place_after(place, s->sources[i].bytes);
        for (uint64_t offset = 0; offset < s->sources[i].bytes; offset += SLICE_BYTES) {
            uint64_t rest = s->sources[i].bytes - offset;
            *p++ = (snapshot_slice){
                .source = (uint32_t)i, .offset = offset, .bytes = rest < SLICE_BYTES ? rest : SLICE_BYTES};
            atomic_init(&p[-1].claimed, true);
        }
    }
}

uint8_t *snapshot_memory(size_t *size, uint64_t need) {
    uint64_t rounded = (need + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    uint8_t *memory = rounded < need || rounded > SIZE_MAX ? NULL : aligned_alloc(HUGE_PAGE, (size_t)rounded);
    if (memory) {
        *size = (size_t)rounded;
        (void)madvise(memory, *size, MADV_HUGEPAGE);
        (void)madvise(memory, *size, MADV_DONTFORK);
        memset(memory, 0, *size);
    }
    return memory;
}

void snapshot_memory_free(uint8_t *memory, size_t size) {
    if (memory) {
        (void)madvise(memory, size, MADV_DOFORK);
        free(memory);
    }
}

ckd_status snapshot_new(snapshot **out, const snapshot_source *sources, size_t count, uint8_t *memory,
                        ckd_error *err) {
    *out = NULL;
    snapshot *s = calloc(1, sizeof(*s));
    if (!s) {
        return err_nomem(err, sizeof(*s), "a snapshot");
    }
    s->sources = sources;
    s->count = count;
    for (size_t i = 0; i < count; i++) {
        s->slice_count += slices_of(&sources[i]);
    }
    uint64_t size = snapshot_size(sources, count);
    s->slices = calloc(s->slice_count + 1, sizeof(*s->slices));
    s->places = calloc(count + 1, sizeof(*s->places));
    s->left = calloc(count + 1, sizeof(*s->left));
    bool rest = s->slices && s->places && s->left;
    s->borrowed = memory != NULL;
    s->memory = !rest ? NULL : memory ? memory : snapshot_memory(&s->size, size ? size : 1);
    if (!s->memory) {
        snapshot_free(s, false);
        return err_nomem(err, size, "a snapshot of the registered state");
    }
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->copied, NULL);
    cut_into_slices(s);
    *out = s;
    return CKD_OK;
}

void snapshot_free(snapshot *s, bool in_child) {
    if (!s) {
        return;
    }
    if (s->memory && !in_child) { /* otherwise there are no locks; a child has no mapping, only its address */
        pthread_mutex_destroy(&s->mutex);
        pthread_cond_destroy(&s->copied);
        snapshot_memory_free(s->borrowed ? NULL : s->memory, s->size);
    }
    free(s->left);
    free(s->places);
    free(s->slices);
    free(s);
}

void snapshot_start(snapshot *s) {
    for (size_t i = 0; i < s->count; i++) {
        atomic_store(&s->left[i], (unsigned)slices_of(&s->sources[i]));
    }
    atomic_store(&s->next, 0);
    for (size_t i = 0; i < s->slice_count; i++) {
        atomic_store_explicit(&s->slices[i].claimed, false, memory_order_release);
    }
}

static bool take(snapshot_slice *p) {
    return !atomic_load_explicit(&p->claimed, memory_order_relaxed) && !atomic_exchange(&p->claimed, true);
}

static void copy_slice(snapshot *s, const snapshot_slice *p) {
    memcpy(s->memory + s->places[p->source] + p->offset,
           (const uint8_t *)s->sources[p->source].data + p->offset, (size_t)p->bytes);
    bool source_copied = atomic_fetch_sub(&s->left[p->source], 1) == 1;
    if (source_copied) {
        pthread_mutex_lock(&s->mutex);
        pthread_cond_broadcast(&s->copied);
        pthread_mutex_unlock(&s->mutex);
    }
}

bool snapshot_help(snapshot *s) {
    for (size_t i = atomic_load(&s->next); i < s->slice_count; i++) {
        if (take(&s->slices[i])) {
            atomic_store(&s->next, i + 1); /* only a hint: it may go back, but never past a free slice */
            copy_slice(s, &s->slices[i]);
            return true;
        }
    }
    return false;
}

static void wait_for(snapshot *s, size_t i) {
    if (atomic_load(&s->left[i]) == 0) {
        return;
    }
    pthread_mutex_lock(&s->mutex);
    while (atomic_load(&s->left[i]) > 0) {
        pthread_cond_wait(&s->copied, &s->mutex);
    }
    pthread_mutex_unlock(&s->mutex);
}

void snapshot_finish(snapshot *s, uint32_t group) {
    for (size_t i = 0; i < s->slice_count; i++) {
        snapshot_slice *p = &s->slices[i];
        if ((group == SNAPSHOT_ALL || s->sources[p->source].group == group) && take(p)) {
            copy_slice(s, p);
        }
    }
    for (size_t i = 0; i < s->count; i++) {
        if (group == SNAPSHOT_ALL || s->sources[i].group == group) {
            wait_for(s, i);
        }
    }
}

bool snapshot_is_complete(const snapshot *s) {
    for (size_t i = 0; i < s->count; i++) {
        if (atomic_load(&s->left[i]) > 0) {
            return false;
        }
    }
    return true;
}

const void *snapshot_read(snapshot *s, size_t i) {
    wait_for(s, i);
    return s->memory + s->places[i];
}

/*
 * Reading ahead. Each read alone would wait for an answer of the server. So threads of the mirror fetch pieces of files
 * before they are asked for: those that were announced; and without announcements, after two reads in the order of the
 * file, the bytes that follow. Loads announce; saves that read their parent, verification and copies read all of a file.
 * Bytes that are fetched and not read cost money: per file they are at most AHEAD_FREE and half of those read.
 */
#include "objects/mirror/mirror.h"

#include <stdlib.h>
#include <unistd.h>

#include "base/threads.h"

#define PIECE      ((uint64_t)2 << 20)
#define GAP        ((uint64_t)64 << 10) /* between two reads in order, at most */
#define BEHIND     ((uint64_t)4 << 20)  /* reads of other threads may be so far behind the farthest one */
#define AHEAD_FREE ((uint64_t)1 << 20)
#define AHEAD_MAX  ((uint64_t)32 << 20)
#define MEMORY_MAX ((uint64_t)128 << 20)
#define HINT_PIECE ((uint64_t)4 << 20)

typedef enum piece_state { PIECE_QUEUED, PIECE_FETCHING, PIECE_READY, PIECE_FAILED } piece_state;

struct ahead_piece {
    ahead_piece *next; /* of the stream, in the order of the file */
    ahead_stream *stream;
    uint64_t at, size, taken; /* taken: bytes that were read from it */
    piece_state state;
    unsigned users; /* threads that wait for it or copy from it */
    bool dropped;   /* no longer in the stream: the last user frees it */
    uint8_t *data;
};

static uint64_t piece_end(const ahead_piece *p) {
    return p->at + p->size;
}

static void piece_free(ahead *a, ahead_piece *p) {
    a->memory -= p->size;
    if (p->stream) {
        p->stream->held -= p->size;
    }
    free(p->data);
    free(p);
}

/* Frees it now, or leaves that to its users. */
static void piece_drop(ahead *a, ahead_piece *p) {
    p->stream->wasted += p->size - p->taken;
    p->stream->held -= p->size;
    p->dropped = true;
    p->stream = NULL;
    if (p->users == 0 && p->state != PIECE_FETCHING) {
        piece_free(a, p);
    }
}

static void stream_drop_pieces(ahead *a, ahead_stream *s) {
    while (s->pieces) {
        ahead_piece *p = s->pieces;
        s->pieces = p->next;
        piece_drop(a, p);
    }
    s->end = 0;
}

/* The stream of a file, in place of the one that was used least recently. */
static ahead_stream *stream_of(ahead *a, const char *name, uint64_t file_size) {
    ahead_stream *oldest = &a->streams[0];
    for (size_t i = 0; i < AHEAD_STREAMS; i++) {
        ahead_stream *s = &a->streams[i];
        if (strcmp(s->name, name) == 0) {
            s->used = ++a->clock;
            return s;
        }
        oldest = s->used < oldest->used ? s : oldest;
    }
    stream_drop_pieces(a, oldest);
    free(oldest->hints);
    *oldest = (ahead_stream){.file_size = file_size, .used = ++a->clock};
    memcpy(oldest->name, name, strlen(name) + 1);
    return oldest;
}

/* ---- threads that fetch ---- */

static ahead_piece *find_queued(ahead *a) {
    for (size_t i = 0; i < AHEAD_STREAMS; i++) {
        for (ahead_piece *p = a->streams[i].pieces; p; p = p->next) {
            if (p->state == PIECE_QUEUED) {
                return p;
            }
        }
    }
    return NULL;
}

/* With the mutex held; releases it meanwhile. */
static void fetch(object_mirror *m, ahead_piece *p) {
    ahead *a = &m->ahead;
    char key[OBJECT_KEY_MAX + 1];
    ckd_status status = mirror_key(key, p->stream->name, NULL);
    p->state = PIECE_FETCHING;
    pthread_mutex_unlock(&a->mutex);
    p->data = malloc((size_t)p->size);
    object_range range = {.offset = p->at, .to = p->data, .size = (size_t)p->size};
    if (status == CKD_OK) {
        status = p->data ? objects_get(m->objects, key, &range, NULL, NULL) : CKD_E_NOMEM;
    }
    pthread_mutex_lock(&a->mutex);
    p->state = status == CKD_OK ? PIECE_READY : PIECE_FAILED;
    if (p->dropped && p->users == 0) {
        piece_free(a, p);
    }
    pthread_cond_broadcast(&a->arrived);
}

static void *run_fetcher(void *context) {
    object_mirror *m = context;
    ahead *a = &m->ahead;
    pthread_mutex_lock(&a->mutex);
    while (!a->closing) {
        ahead_piece *p = find_queued(a);
        if (p) {
            fetch(m, p);
        } else {
            pthread_cond_wait(&a->queued, &a->mutex);
        }
    }
    pthread_mutex_unlock(&a->mutex);
    return NULL;
}

/* Without threads, pieces would stay queued: then nothing is read ahead. */
static bool start_fetchers(object_mirror *m) {
    ahead *a = &m->ahead;
    while (a->thread_count < AHEAD_THREADS &&
           thread_start(&a->threads[a->thread_count], run_fetcher, m, NULL) == CKD_OK) {
        a->thread_count++;
    }
    return a->thread_count > 0;
}

/* ---- reading ---- */

/* How many bytes may be fetched behind the last one that was read. */
static uint64_t window_of(const ahead_stream *s) {
    uint64_t allowed = AHEAD_FREE + s->read / 2;
    allowed = allowed > s->wasted ? allowed - s->wasted : 0;
    return allowed < AHEAD_MAX ? allowed : AHEAD_MAX;
}

/* Appends a piece to those that are fetched. False if memory is short. */
static bool queue_piece(object_mirror *m, ahead_stream *s, uint64_t at, uint64_t size) {
    ahead *a = &m->ahead;
    ahead_piece **last = &s->pieces, *p = NULL;
    if (a->memory + size <= MEMORY_MAX && start_fetchers(m)) {
        p = calloc(1, sizeof(*p));
    }
    if (!p) {
        return false;
    }
    *p = (ahead_piece){.stream = s, .at = at, .size = size};
    while (*last && (*last)->at < at) {
        last = &(*last)->next;
    }
    p->next = *last;
    *last = p;
    a->memory += size;
    s->held += size;
    pthread_cond_signal(&a->queued);
    return true;
}

/* Files share the memory, so that none waits for another one's pieces to be read. */
static void queue_announced(object_mirror *m, ahead_stream *s) {
    ahead *a = &m->ahead;
    uint64_t files = 0;
    for (size_t i = 0; i < AHEAD_STREAMS; i++) {
        files += a->streams[i].hints != NULL;
    }
    while (s->hint < s->hint_count && s->held < MEMORY_MAX / (files ? files : 1)) {
        file_range *r = &s->hints[s->hint];
        uint64_t size = r->size < HINT_PIECE ? r->size : HINT_PIECE;
        if (!queue_piece(m, s, r->offset, size)) {
            return;
        }
        r->offset += size;
        r->size -= size;
        s->hint += r->size == 0;
    }
    if (s->hint == s->hint_count && !s->pieces) {
        free(s->hints);
        s->hints = NULL;
        s->hint = s->hint_count = 0;
    }
}

static void queue_pieces(object_mirror *m, ahead_stream *s) {
    uint64_t end = s->next + window_of(s);
    end = end < s->file_size ? end : s->file_size;
    uint64_t at = s->end > s->next ? s->end : s->next;
    while (at < end) {
        uint64_t size = end - at < PIECE ? end - at : PIECE;
        /* A small one is worth a request of its own only at the end: the window grows. */
        if ((size < PIECE / 4 && end < s->file_size) || !queue_piece(m, s, at, size)) {
            return;
        }
        s->end = at += size;
    }
}

/* Notes a read, and decides whether the next ones can be foreseen. */
static void note_read(object_mirror *m, ahead_stream *s, uint64_t offset, uint64_t size) {
    bool in_order = offset <= s->next + GAP && offset + BEHIND >= s->next && s->next > 0;
    s->read += size;
    if (s->hints) {
        queue_announced(m, s);
        return;
    }
    if (in_order) {
        s->run++;
        s->next = offset + size > s->next ? offset + size : s->next;
    } else {
        stream_drop_pieces(&m->ahead, s);
        s->run = 0;
        s->next = offset + size;
    }
    if (s->run > 0) {
        queue_pieces(m, s);
    }
}

/* The piece that has a byte, or the first one behind it. */
static ahead_piece *find_piece(const ahead_stream *s, uint64_t at) {
    ahead_piece *p = s->pieces;
    while (p && piece_end(p) <= at) {
        p = p->next;
    }
    return p;
}

/* A piece that was read to its end, or that failed, is of no more use. */
static void release_piece(ahead *a, ahead_piece *p) {
    p->users--;
    if (p->dropped) {
        if (p->users == 0 && p->state != PIECE_FETCHING) {
            piece_free(a, p);
        }
        return;
    }
    if (p->users > 0 || (p->state != PIECE_FAILED && p->taken < p->size)) {
        return;
    }
    ahead_piece **link = &p->stream->pieces;
    while (*link != p) {
        link = &(*link)->next;
    }
    *link = p->next;
    p->stream->wasted += p->state == PIECE_FAILED ? 0 : p->size - p->taken;
    piece_free(a, p);
}

/* Copies from a piece once it is there. Returns the number of bytes; 0: they have to be read. */
static size_t take(ahead *a, ahead_piece *p, uint64_t at, void *to, size_t size) {
    size_t count = 0;
    p->users++;
    while (p->state == PIECE_FETCHING || (p->state == PIECE_QUEUED && !p->dropped)) {
        pthread_cond_wait(&a->arrived, &a->mutex);
    }
    if (p->state == PIECE_READY) {
        count = piece_end(p) - at < size ? (size_t)(piece_end(p) - at) : size;
        memcpy(to, p->data + (at - p->at), count);
        p->taken = p->taken + count < p->size ? p->taken + count : p->size;
    }
    release_piece(a, p);
    return count;
}

ckd_status ahead_read(object_mirror *m, const char *name, uint64_t file_size, const object_range *range,
                      ckd_error *err) {
    ahead *a = &m->ahead;
    char key[OBJECT_KEY_MAX + 1];
    ckd_status status = mirror_key(key, name, err);
    /* A forked child has no threads that fetch. */
    if (status != CKD_OK || strlen(name) >= AHEAD_NAME || m->process != getpid()) {
        return status != CKD_OK ? status : objects_get(m->objects, key, range, NULL, err);
    }
    pthread_mutex_lock(&a->mutex);
    note_read(m, stream_of(a, name, file_size), range->offset, range->size);
    for (size_t done = 0; done < range->size && status == CKD_OK;) {
        uint64_t at = range->offset + done;
        uint8_t *to = (uint8_t *)range->to + done;
        ahead_piece *p = find_piece(stream_of(a, name, file_size), at);
        bool inside = p && p->at <= at;
        size_t count = inside ? take(a, p, at, to, range->size - done) : 0;
        if (count == 0) { /* up to the next piece, but not beyond one that failed */
            uint64_t end = range->offset + range->size;
            end = p && !inside && p->at < end ? p->at : end;
            object_range part = {.offset = at, .to = to, .size = count = (size_t)(end - at)};
            pthread_mutex_unlock(&a->mutex);
            status = objects_get(m->objects, key, &part, NULL, err);
            pthread_mutex_lock(&a->mutex);
        }
        done += count;
    }
    pthread_mutex_unlock(&a->mutex);
    return status;
}

/* ---- announcements ---- */

/* Joins ranges that overlap or are close, as long as little is fetched in vain. Returns how many are left. */
static size_t join(file_range *ranges, size_t count) {
    size_t kept = 0;
    uint64_t useful = 0, wasted = 0;
    for (size_t i = 0; i < count; i++) {
        file_range r = ranges[i], *last = kept > 0 ? &ranges[kept - 1] : NULL;
        uint64_t last_end = last ? last->offset + last->size : 0, end = r.offset + r.size,
                 gap = r.offset > last_end ? r.offset - last_end : 0;
        useful += r.size;
        if (last && gap <= GAP && wasted + gap <= useful / 16) {
            wasted += gap;
            last->size = (end > last_end ? end : last_end) - last->offset;
        } else if (r.size > 0) {
            ranges[kept++] = r;
        }
    }
    return kept;
}

void ahead_announce(object_mirror *m, const char *name, uint64_t file_size, const file_range *ranges,
                    size_t count) {
    ahead *a = &m->ahead;
    file_range *own =
        strlen(name) < AHEAD_NAME && m->process == getpid() ? calloc(count + 1, sizeof(*own)) : NULL;
    if (!own) {
        return;
    }
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        bool inside = ranges[i].offset <= file_size && ranges[i].size <= file_size - ranges[i].offset;
        own[kept] = ranges[i];
        kept += inside;
    }
    kept = join(own, kept);
    pthread_mutex_lock(&a->mutex);
    ahead_stream *s = stream_of(a, name, file_size);
    stream_drop_pieces(a, s);
    free(s->hints);
    s->hints = own;
    s->hint = 0;
    s->hint_count = kept;
    queue_announced(m, s);
    pthread_mutex_unlock(&a->mutex);
}

/* ---- beginning and end ---- */

void ahead_init(ahead *a) {
    pthread_mutex_init(&a->mutex, NULL);
    pthread_cond_init(&a->queued, NULL);
    pthread_cond_init(&a->arrived, NULL);
}

void ahead_destroy(ahead *a) {
    pthread_mutex_lock(&a->mutex);
    a->closing = true;
    pthread_cond_broadcast(&a->queued);
    pthread_mutex_unlock(&a->mutex);
    for (size_t i = 0; i < a->thread_count; i++) {
        pthread_join(a->threads[i], NULL);
    }
    for (size_t i = 0; i < AHEAD_STREAMS; i++) {
        stream_drop_pieces(a, &a->streams[i]);
        free(a->streams[i].hints);
    }
    pthread_cond_destroy(&a->arrived);
    pthread_cond_destroy(&a->queued);
    pthread_mutex_destroy(&a->mutex);
}

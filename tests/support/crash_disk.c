#include "tests/support/crash_disk.h"

#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>

#include "base/hash.h"
#include "tests/support/scenes.h"

enum { SECTOR = 512, ALL_SUBSETS = 4 };
#define WAYS DATA_RANDOM

typedef struct content {
    unsigned char *data;
    size_t size;
    uint64_t hash;
} content;

struct crash_disk {
    const op_record *record;
    crash_syncs_fn syncs;
    const void *context;
    size_t point;
    content *files; /* by node; the durable contents */
    const op **names;
    size_t name_count;
    const op **pending; /* writes and names that are not durable */
    size_t pending_count;
    op *renamed; /* the names after renames, made when they are needed */
    size_t renamed_count, renamed_capacity;
    size_t expected;
};

static uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- contents ---- */

static void set_size(content *c, size_t size) {
    if (size > c->size) {
        c->data = realloc(c->data, size);
        assert_non_null(c->data);
        memset(c->data + c->size, 0, size - c->size);
    }
    c->size = size;
}

static void put(content *c, uint64_t offset, const void *data, size_t size) {
    if (offset + size > c->size) {
        set_size(c, (size_t)offset + size);
    }
    if (size) {
        memcpy(c->data + offset, data, size);
    }
}

static void apply_data(content *c, const op *o) {
    if (o->kind == OP_TRUNCATE) {
        set_size(c, (size_t)o->offset);
    } else {
        put(c, o->offset, o->data, o->size);
    }
}

/* Applies a random half of its sectors. */
static void apply_sectors(content *c, const op *o, uint64_t seed) {
    if (o->kind == OP_TRUNCATE) {
        if (mix(seed) & 1) {
            set_size(c, (size_t)o->offset);
        }
        return;
    }
    for (size_t done = 0; done < o->size;) {
        size_t at = (size_t)o->offset + done, part = SECTOR - at % SECTOR;
        part = part < o->size - done ? part : o->size - done;
        if (mix(seed + at / SECTOR * 0x9e3779b97f4a7c15u) & 1) {
            put(c, at, o->data + done, part);
        }
        done += part;
    }
}

static bool is_data(const op *o, unsigned node) {
    return (o->kind == OP_WRITE || o->kind == OP_TRUNCATE) && o->node == node;
}

static const op *last_write(const crash_disk *d, unsigned node) {
    const op *last = NULL;
    for (size_t i = 0; i < d->pending_count; i++) {
        last = is_data(d->pending[i], node) && d->pending[i]->kind == OP_WRITE ? d->pending[i] : last;
    }
    return last;
}

static void apply_way(content *c, const crash_disk *d, unsigned node, crash_data way, uint64_t seed) {
    const op *last = last_write(d, node);
    size_t size = c->size;
    for (size_t i = 0; i < d->pending_count; i++) {
        const op *o = d->pending[i];
        if (!is_data(o, node)) {
            continue;
        }
        size_t end = (size_t)o->offset + o->size;
        size = o->kind == OP_TRUNCATE || end > size ? end : size;
        if (way == DATA_ALL || (way == DATA_LAST && o == last) || (way == DATA_TORN && o != last)) {
            apply_data(c, o);
        } else if (way == DATA_TORN) {
            put(c, o->offset, o->data, o->size / 2 >= SECTOR ? o->size / 2 / SECTOR * SECTOR : o->size / 2);
        } else if (way == DATA_RANDOM) {
            apply_sectors(c, o, seed + i);
        }
    }
    if (way == DATA_SIZE || (way == DATA_RANDOM && (mix(seed + node) & 1))) {
        set_size(c, size);
    }
}

static crash_data way_of(const crash_state *s, unsigned node) {
    return s->node == UINT_MAX || s->node == node ? s->data : s->others;
}

/* The data of a node in a state; `data` is malloc'ed. */
static content content_of(const crash_disk *d, const crash_state *s, unsigned node) {
    const content *durable = &d->files[node];
    content c = {.data = malloc(durable->size + 1), .size = durable->size};
    assert_non_null(c.data);
    memcpy(c.data, durable->size ? (void *)durable->data : "", durable->size);
    if (way_of(s, node) != DATA_NONE) {
        apply_way(&c, d, node, way_of(s, node), s->seed);
    }
    return c;
}

static bool has_pending_data(const crash_disk *d, unsigned node) {
    for (size_t i = 0; i < d->pending_count; i++) {
        if (is_data(d->pending[i], node)) {
            return true;
        }
    }
    return false;
}

/* ---- names ---- */

static void unname(const op **names, size_t *count, unsigned dir, const char *name, unsigned node) {
    for (size_t i = 0; i < *count; i++) {
        if (names[i]->dir == dir && strcmp(names[i]->name, name) == 0 &&
            (node == UINT_MAX || names[i]->node == node)) {
            memmove(names + i, names + i + 1, (--*count - i) * sizeof(*names));
            return;
        }
    }
}

/* The name after an operation. A rename counts like any other new name. */
static const op *given_by(crash_disk *d, const op *o) {
    if (o->kind == OP_NAME) {
        return o;
    }
    return &d->renamed[o - d->record->ops];
}

static void apply_name(crash_disk *d, const op **names, size_t *count, const op *o) {
    if (o->kind != OP_NAME) {
        unname(names, count, o->dir, o->name, o->node);
    }
    if (o->kind != OP_UNNAME) {
        const op *given = given_by(d, o);
        unname(names, count, given->dir, given->name, UINT_MAX);
        names[(*count)++] = given;
    }
}

static bool is_name(const op *o) {
    return o->kind == OP_NAME || o->kind == OP_UNNAME || o->kind == OP_RENAME;
}

static size_t count_names(const crash_disk *d) {
    size_t count = 0;
    for (size_t i = 0; i < d->pending_count; i++) {
        count += is_name(d->pending[i]);
    }
    return count;
}

/* The names of a state; malloc'ed. */
static const op **names_of(size_t *count, crash_disk *d, const crash_state *s) {
    const op **names = malloc((d->name_count + d->pending_count + 1) * sizeof(*names));
    assert_non_null(names);
    memcpy(names, d->names, d->name_count * sizeof(*names));
    *count = d->name_count;
    for (size_t i = 0, bit = 0; i < d->pending_count; i++) {
        if (is_name(d->pending[i])) {
            if (bit > 63 || (s->names >> bit & 1)) {
                apply_name(d, names, count, d->pending[i]);
            }
            bit++;
        }
    }
    return names;
}

/* ---- going through a record ---- */

crash_disk *crash_disk_new(const op_record *r, crash_syncs_fn syncs, const void *context) {
    crash_disk *d = calloc(1, sizeof(*d));
    assert_non_null(d);
    *d = (crash_disk){.record = r, .syncs = syncs, .context = context};
    d->files = calloc(r->node_count + 1, sizeof(*d->files));
    d->names = calloc(r->name_count + r->count + 1, sizeof(*d->names));
    d->pending = calloc(r->count + 1, sizeof(*d->pending));
    d->renamed = calloc(r->count + 1, sizeof(*d->renamed));
    assert_true(d->files && d->names && d->pending && d->renamed);
    for (size_t i = 0; i < r->node_count; i++) {
        put(&d->files[i], 0, r->nodes[i].content, r->nodes[i].size);
        d->files[i].hash = hash64(d->files[i].size ? (void *)d->files[i].data : "", d->files[i].size);
    }
    for (size_t i = 0; i < r->name_count; i++) {
        d->names[d->name_count++] = &r->names[i];
    }
    for (size_t i = 0; i < r->count; i++) {
        const op *o = &r->ops[i];
        if (o->kind == OP_RENAME) {
            d->renamed[i] = (op){.kind = OP_NAME, .node = o->node, .dir = o->to_dir};
            memcpy(d->renamed[i].name, o->to_name, OP_NAME_MAX);
        }
    }
    return d;
}

void crash_disk_free(crash_disk *d) {
    for (size_t i = 0; i < d->record->node_count; i++) {
        free(d->files[i].data);
    }
    free(d->files);
    free(d->names);
    free(d->pending);
    free(d->renamed);
    free(d);
}

static void settle(crash_disk *d, const op *sync) {
    size_t kept = 0;
    for (size_t i = 0; i < d->pending_count; i++) {
        const op *o = d->pending[i];
        bool names = is_name(o) && sync->kind == OP_DIR_SYNC &&
                     (o->dir == sync->node || (o->kind == OP_RENAME && o->to_dir == sync->node));
        bool data = sync->kind == OP_SYNC && is_data(o, sync->node);
        if (names) {
            apply_name(d, d->names, &d->name_count, o);
        } else if (data) {
            apply_data(&d->files[o->node], o);
        } else {
            d->pending[kept++] = o;
        }
    }
    d->pending_count = kept;
    content *c = &d->files[sync->node];
    c->hash = hash64(c->size ? (void *)c->data : "", c->size);
}

static void advance(crash_disk *d) {
    const op *o = &d->record->ops[d->point++];
    if (o->kind == OP_EXPECT) {
        d->expected = o->expected;
    } else if (o->kind != OP_SYNC && o->kind != OP_DIR_SYNC) {
        d->pending[d->pending_count++] = o;
    } else if (!d->syncs || d->syncs(d->context, o)) {
        settle(d, o);
    }
}

/* ---- enumerating ---- */

typedef struct enumeration {
    crash_disk *d;
    crash_states *out;
    crash_keys *keys;
    uint64_t *hashes; /* by node and way, at the present point; 0: not computed yet */
} enumeration;

static uint64_t file_hash(const enumeration *e, const crash_state *s, unsigned node) {
    crash_data way = way_of(s, node);
    if (way == DATA_NONE || !has_pending_data(e->d, node)) {
        return e->d->files[node].hash;
    }
    uint64_t *known = way < WAYS ? &e->hashes[node * WAYS + way] : NULL;
    if (known && *known) {
        return *known;
    }
    content c = content_of(e->d, s, node);
    uint64_t hash = hash64(c.data, c.size);
    free(c.data);
    if (known) {
        *known = hash;
    }
    return hash;
}

static uint64_t tree_hash(const enumeration *e, const crash_state *s, const op **names, size_t count,
                          unsigned dir) {
    uint64_t sum = 1;
    for (size_t i = 0; i < count; i++) {
        const op *o = names[i];
        if (o->dir == dir) {
            bool below = e->d->record->nodes[o->node].is_directory;
            uint64_t hash = below ? tree_hash(e, s, names, count, o->node) : file_hash(e, s, o->node);
            sum += mix(hash64(o->name, strlen(o->name)) + mix(hash));
        }
    }
    return mix(sum);
}

/* Returns false if the key was there. */
static bool keys_add(crash_keys *k, uint64_t key) {
    if (k->count * 2 >= k->capacity) {
        crash_keys larger = {.capacity = k->capacity ? k->capacity * 2 : 1024};
        larger.slots = calloc(larger.capacity, sizeof(*larger.slots));
        assert_non_null(larger.slots);
        for (size_t i = 0; i < k->capacity; i++) {
            if (k->slots[i]) {
                keys_add(&larger, k->slots[i]);
            }
        }
        free(k->slots);
        *k = larger;
    }
    key = key ? key : 1;
    size_t at = (size_t)(mix(key) % k->capacity);
    while (k->slots[at] && k->slots[at] != key) {
        at = (at + 1) % k->capacity;
    }
    bool added = k->slots[at] == 0;
    k->slots[at] = key;
    k->count += added;
    return added;
}

static void add_state(const enumeration *e, crash_state s) {
    size_t count;
    const op **names = names_of(&count, e->d, &s);
    s.point = e->d->point;
    s.expected = e->d->expected;
    s.key = tree_hash(e, &s, names, count, 0) ^ mix(s.expected + 1);
    free(names);
    if (!keys_add(e->keys, s.key)) {
        return;
    }
    crash_states *out = e->out;
    if (out->count == out->capacity) {
        out->capacity = out->capacity ? out->capacity * 2 : 256;
        out->items = realloc(out->items, out->capacity * sizeof(*out->items));
        assert_non_null(out->items);
    }
    out->items[out->count++] = s;
}

/* Adds the states with these names, for each simple way of all files' data. */
static void add_ways(const enumeration *e, uint64_t names, bool simple) {
    static const crash_data ways[] = {DATA_NONE, DATA_SIZE, DATA_ALL};
    for (size_t i = 0; i < 3; i++) {
        add_state(e, (crash_state){.names = names, .data = ways[i], .node = UINT_MAX, .simple = simple});
    }
}

/* Returns whether the next operation is no write or truncation. */
static bool at_end_of_writes(const crash_disk *d) {
    return d->point == d->record->count ||
           (d->record->ops[d->point].kind != OP_WRITE && d->record->ops[d->point].kind != OP_TRUNCATE);
}

static void add_names(const enumeration *e) {
    size_t count = count_names(e->d);
    add_ways(e, 0, at_end_of_writes(e->d));
    add_ways(e, UINT64_MAX, at_end_of_writes(e->d));
    if (count <= ALL_SUBSETS) {
        for (uint64_t names = 1; names + 1 < UINT64_C(1) << count; names++) {
            add_ways(e, names, false);
        }
        return;
    }
    for (size_t i = 0; i < count && i < 63; i++) {
        add_ways(e, UINT64_C(1) << i, false);
        add_ways(e, ~(UINT64_C(1) << i), false);
        add_ways(e, (UINT64_C(1) << i) - 1, false);
    }
}

/* Adds the states in which one file's data differs from that of all others. */
static void add_files(const enumeration *e) {
    for (unsigned node = 0; node < e->d->record->node_count; node++) {
        if (!has_pending_data(e->d, node)) {
            continue;
        }
        for (crash_data way = DATA_NONE; way < DATA_RANDOM; way++) {
            crash_data others = way == DATA_ALL ? DATA_NONE : DATA_ALL;
            add_state(e, (crash_state){.names = UINT64_MAX, .data = way, .others = others, .node = node});
        }
    }
}

void crash_states_add(crash_states *out, crash_keys *keys, const op_record *r, unsigned more, uint64_t seed,
                      crash_syncs_fn syncs, const void *context) {
    crash_disk *d = crash_disk_new(r, syncs, context);
    enumeration e = {.d = d, .out = out, .keys = keys};
    e.hashes = calloc((r->node_count + 1) * WAYS, sizeof(*e.hashes));
    assert_non_null(e.hashes);
    for (;;) {
        memset(e.hashes, 0, (r->node_count + 1) * WAYS * sizeof(*e.hashes));
        add_names(&e);
        add_files(&e);
        for (unsigned i = 0; i < more; i++) {
            uint64_t z = mix(seed + d->point * 1000003 + i);
            add_state(&e, (crash_state){.names = mix(z), .data = DATA_RANDOM, .node = UINT_MAX, .seed = z});
        }
        if (d->point == r->count) {
            break;
        }
        advance(d);
    }
    free(e.hashes);
    crash_disk_free(d);
}

void crash_states_free(crash_states *states) {
    free(states->items);
    *states = (crash_states){0};
}

void crash_keys_free(crash_keys *keys) {
    free(keys->slots);
    *keys = (crash_keys){0};
}

/* ---- writing ---- */

static void write_below(crash_disk *d, const crash_state *s, const op **names, size_t count, unsigned dir,
                        const char *to) {
    assert_int_equal(mkdir(to, 0777), 0);
    for (size_t i = 0; i < count; i++) {
        const op *o = names[i];
        char below[1200];
        if (o->dir != dir) {
            continue;
        }
        snprintf(below, sizeof(below), "%s/%s", to, o->name);
        if (d->record->nodes[o->node].is_directory) {
            write_below(d, s, names, count, o->node, below);
        } else {
            content c = content_of(d, s, o->node);
            write_whole_file(below, c.data, c.size);
            free(c.data);
        }
    }
}

static void go_to(crash_disk *d, size_t point) {
    assert_true(point >= d->point);
    while (d->point < point) {
        advance(d);
    }
}

void crash_disk_write(crash_disk *d, const crash_state *s, const char *to) {
    size_t count;
    go_to(d, s->point);
    const op **names = names_of(&count, d, s);
    write_below(d, s, names, count, 0, to);
    free(names);
}

const char *crash_disk_describe(crash_disk *d, const crash_state *s) {
    static const char *const ways[] = {
        "no data", "all data", "zeros", "half of the last write", "only the last write", "some sectors"};
    static const char *const kinds[] = {"write",  "truncate", "sync",           "name",
                                        "unname", "rename",   "directory sync", "expected"};
    static char text[4096];
    size_t used = 0;
    go_to(d, s->point);
    const op *last = s->point ? &d->record->ops[s->point - 1] : NULL;
    used += (size_t)snprintf(text, sizeof(text), "after operation %zu of %zu (%s %s%s%s), expected %zu, %s",
                             s->point, d->record->count, last ? kinds[last->kind] : "none",
                             last ? last->name : "", last && last->kind == OP_RENAME ? " to " : "",
                             last ? last->to_name : "", s->expected, ways[s->data]);
    if (s->node != UINT_MAX) {
        used += (size_t)snprintf(text + used, sizeof(text) - used, " in node %u, %s elsewhere", s->node,
                                 ways[s->others]);
    }
    for (size_t i = 0, bit = 0; i < d->pending_count && used + 400 < sizeof(text); i++) {
        const op *o = d->pending[i];
        bool there = bit > 63 || (s->names >> bit & 1);
        bit += is_name(o);
        used += (size_t)snprintf(text + used, sizeof(text) - used,
                                 "\n    %s %s%s%s node %u at %llu, %zu bytes: %s", kinds[o->kind], o->name,
                                 o->kind == OP_RENAME ? " to " : "", o->to_name, o->node,
                                 (unsigned long long)o->offset, o->size,
                                 !is_name(o) ? "not synced"
                                 : there     ? "there"
                                             : "lost");
    }
    return text;
}

/* Parts of files: their names, their records, and which of them the destination has already. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/transfer/internal.h"
#include "engine/store/store.h"
#include "engine/transfer/parts.h"

enum { PREFIX = 8 };

/* ---- names of parts ---- */

static void prefix_of(uint8_t out[PREFIX], const ckd_id *file) {
    uint64_t hash = hash64(file, sizeof(*file));
    for (size_t i = 0; i < PREFIX; i++) {
        out[i] = (uint8_t)(hash >> (8 * i));
    }
}

ckd_status transfer_name_part(ckd_id *out, const ckd_id *file, ckd_error *err) {
    ckd_status status = ckd_id_new(out, err);
    prefix_of(out->bytes, file);
    return status;
}

/* Returns the index of the first name that begins with `prefix`, or the length of the list. */
static size_t first_with(const dir_list *list, const char *prefix) {
    size_t low = 0, high = list->count, length = strlen(prefix);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (strncmp(list->names[middle], prefix, length) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < list->count && strncmp(list->names[low], prefix, length) == 0 ? low : list->count;
}

typedef char prefix_text[3 * CKD_ID_TEXT];

/*
 * Writes how the names of a file's parts begin, in data/c and in data/x. In data/x the id of the source store comes
 * first.
 */
static void write_prefixes(prefix_text chunk_prefix, prefix_text incoming_prefix, const choosing *c,
                           const part_source *s) {
    ckd_id id = {{0}};
    char hex[CKD_ID_TEXT], store[CKD_ID_TEXT];
    prefix_of(id.bytes, &s->file.id);
    ckd_id_text(hex, &id);
    ckd_id_text(store, &c->t->from->id);
    snprintf(chunk_prefix, sizeof(prefix_text), "%.*s", 2 * PREFIX, hex);
    snprintf(incoming_prefix, sizeof(prefix_text), "%s.%.*s", store, 2 * PREFIX, hex);
}

/* ---- records of parts ---- */

ckd_status transfer_add_part(transfer_part **out, transfer *t, const transfer_part *p, ckd_error *err) {
    if (ARRAY_GROW(t->parts, t->part_capacity, t->part_count + 1, "chunk files to copy", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    *out = &t->parts[t->part_count++];
    **out = *p;
    return CKD_OK;
}

void transfer_free_part(transfer_part *p) {
    free(p->records.slots);
    free(p->owners);
}

transfer_owner *transfer_find_owner(transfer_owner *owners, size_t count, const ckd_id *checkpoint) {
    transfer_owner *found = NULL;
    for (size_t i = count; i-- > 0 && !found;) {
        found = id_equal(&owners[i].checkpoint, checkpoint) ? &owners[i] : NULL;
    }
    return found;
}

ckd_status transfer_count_owner(transfer_owner **owners, size_t *count, const record *r, ckd_error *err) {
    transfer_owner *owner = transfer_find_owner(*owners, *count, &r->tensor->checkpoint);
    if (!owner) {
        transfer_owner *grown = realloc(*owners, (*count + 1) * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, (*count + 1) * sizeof(*grown), "checkpoints of a chunk file");
        }
        *owners = grown;
        owner = &grown[(*count)++];
        *owner = (transfer_owner){.checkpoint = r->tensor->checkpoint};
    }
    owner->records++;
    return CKD_OK;
}

ckd_status transfer_add_record(transfer_part *p, const record *r, ckd_error *err) {
    ckd_status status = hash_set_add(&p->records, record_hash(r), err);
    return status == CKD_OK ? transfer_count_owner(&p->owners, &p->owner_count, r, err) : status;
}

/* ---- existing parts ---- */

bool transfer_may_have_parts(const choosing *c, const part_source *s) {
    prefix_text chunk_prefix, incoming_prefix;
    write_prefixes(chunk_prefix, incoming_prefix, c, s);
    return first_with(&c->named, chunk_prefix) < c->named.count ||
           first_with(&c->arrived, incoming_prefix) < c->arrived.count;
}

/* A part that the destination may have. */
typedef struct candidate {
    const part_source *s;
    const hash_set *have; /* records of the parts that are used already */
    transfer_part part;
    bool is_of_use;
} candidate;

static ckd_status add_found_record(void *context, const chunk *c, const record *r, ckd_error *err) {
    candidate *k = context;
    uint64_t hash = record_hash(r);
    (void)c;
    k->is_of_use = k->is_of_use || (hash_set_has(&k->s->records, hash) && !hash_set_has(k->have, hash));
    return transfer_add_record(&k->part, r, err);
}

/*
 * Finds the checkpoints whose records are all in the part. It can be their own file, and is of use if no other part
 * can.
 */
static void mark_complete_owners(candidate *k) {
    for (size_t i = 0; i < k->part.owner_count; i++) {
        transfer_owner *owner = &k->part.owners[i];
        const transfer_owner *all = transfer_find_owner(k->s->owners, k->s->owner_count, &owner->checkpoint);
        owner->has_all = all && all->records == owner->records;
        k->is_of_use = k->is_of_use || (owner->has_all && !all->has_all);
    }
}

/*
 * Checks that the whole part can be read, and that it has needed records that no other part has. NOT_FOUND: it is of
 * no use.
 */
static ckd_status examine(candidate *k, choosing *c, const char *path, ckd_error *err) {
    chunk *file = NULL;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    const file_ref *claimed = &k->part.file;
    ckd_status status = chunk_open_bundled(&file, path, &why);
    if (status == CKD_OK &&
        !(id_equal(&file->identity.file, &claimed->id) && id_equal(&file->identity.store, &c->t->to->id))) {
        status = CKD_E_NOT_FOUND;
    }
    if (status == CKD_OK) {
        k->part.file.size = file->size;
        k->part.file.root = file->root;
        status = chunk_each_record(file, add_found_record, k, &why);
        mark_complete_owners(k);
    }
    if (status == CKD_OK && !k->is_of_use) {
        status = CKD_E_NOT_FOUND;
    }
    THEN(status, chunk_read_in_order(file, &why));
    for (size_t i = 0; status == CKD_OK && i < file->outer_count; i++) {
        status = record_read_through(&c->payload, file, &file->outer[i], &why);
    }
    chunk_close(file);
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : status == CKD_OK ? CKD_OK : CKD_E_NOT_FOUND;
}

static ckd_status use_candidate(choosing *c, part_source *s, hash_set *have, const char *id, bool is_there,
                                ckd_error *err) {
    transfer_part *added;
    candidate k = {.s = s, .have = have};
    k.part = (transfer_part){
        .file.rank = s->file.rank, .source = s->file, .in_place = is_there, .is_complete = !is_there};
    if (!id_parse(&k.part.file.id, id)) {
        return CKD_OK;
    }
    pathname p =
        is_there ? path_chunk(c->t->to->path, &k.part.file.id, "") : transfer_path(c->t, &k.part.file.id);
    ckd_status status = examine(&k, c, p.text, err);
    for (size_t i = 0; i < k.part.records.capacity && status == CKD_OK; i++) {
        status = k.part.records.slots[i] ? hash_set_add(have, k.part.records.slots[i], err) : CKD_OK;
    }
    THEN(status, transfer_add_part(&added, c->t, &k.part, err));
    if (status != CKD_OK) {
        transfer_free_part(&k.part);
        bool useless = status == CKD_E_NOT_FOUND; /* no copy would use it: new parts get other names */
        if (useless && !is_there && !c->t->options->dry_run) {
            file_remove(p.text, true, NULL);
        }
        return useless ? CKD_OK : status;
    }
    s->part_count++;
    for (size_t i = 0; i < added->owner_count; i++) {
        transfer_owner *all = transfer_find_owner(s->owners, s->owner_count, &added->owners[i].checkpoint);
        if (all && added->owners[i].has_all) {
            all->has_all = true;
        }
    }
    return CKD_OK;
}

ckd_status transfer_use_parts(choosing *c, part_source *s, hash_set *have, ckd_error *err) {
    prefix_text chunk_prefix, incoming_prefix;
    ckd_status status = CKD_OK;
    write_prefixes(chunk_prefix, incoming_prefix, c, s);
    for (size_t i = first_with(&c->named, chunk_prefix);
         i < c->named.count && strncmp(c->named.names[i], chunk_prefix, strlen(chunk_prefix)) == 0 &&
         status == CKD_OK;
         i++) {
        char id[CKD_ID_TEXT];
        snprintf(id, sizeof(id), "%s", c->named.names[i]);
        bool is_chunk = strcmp(c->named.names[i] + strlen(id), ".ckd") == 0;
        status = is_chunk ? use_candidate(c, s, have, id, true, err) : CKD_OK;
    }
    for (size_t i = first_with(&c->arrived, incoming_prefix);
         i < c->arrived.count &&
         strncmp(c->arrived.names[i], incoming_prefix, strlen(incoming_prefix)) == 0 && status == CKD_OK;
         i++) {
        status = use_candidate(c, s, have, c->arrived.names[i] + CKD_ID_TEXT, false, err);
    }
    return status;
}

/*
 * The envelope and the fields that all metadata files share. A reader keeps its first failure, so parsers take all
 * fields and check once, at metadata_close.
 */
#include "codec/metadata/metadata.h"

#include <stdlib.h>

/* ---- writing ---- */

size_t metadata_begin(bytes *to, metadata_kind kind, const ckd_id *store, uint32_t generation,
                      uint32_t features) {
    size_t start = to->size;
    bytes_put(to, METADATA_MAGIC, 8);
    bytes_put_u16(to, METADATA_VERSION);
    bytes_put_u16(to, (uint16_t)kind);
    bytes_put_u32(to, features);
    wire_put_id(to, store);
    bytes_put_u32(to, generation);
    bytes_put_u32(to, 0); /* payload size, set by metadata_end */
    return start;
}

void metadata_end(bytes *to, size_t start) {
    if (to->failed || to->size - start > METADATA_MAX - 8) {
        to->failed = true;
        return;
    }
    store_le32(to->data + start + METADATA_ENVELOPE_FRONT - 4,
               (uint32_t)(to->size - start - METADATA_ENVELOPE_FRONT));
    bytes_put_u64(to, hash64(to->data + start, to->size - start));
}

static void put_count(bytes *to, size_t count) {
    if (count > METADATA_MAX) {
        to->failed = true;
    }
    bytes_put_u32(to, (uint32_t)count);
}

void metadata_put_ids(bytes *to, const ckd_id *ids, size_t count) {
    put_count(to, count);
    for (size_t i = 0; i < count && !to->failed; i++) {
        wire_put_id(to, &ids[i]);
    }
}

void metadata_put_file(bytes *to, const file_ref *f) {
    wire_put_id(to, &f->id);
    bytes_put_u32(to, f->rank);
    bytes_put_u64(to, f->size);
    wire_put_hash(to, &f->root);
}

void metadata_put_files(bytes *to, const file_ref *files, size_t count) {
    put_count(to, count);
    for (size_t i = 0; i < count && !to->failed; i++) {
        metadata_put_file(to, &files[i]);
    }
}

/* ---- reading: the envelope ---- */

static const char *kind_name(unsigned kind) {
    static const char *const names[] = {"nothing", "store",        "manifest",     "tombstone", "intent",
                                        "part",    "rename",       "pin",          "tag",       "policy",
                                        "parity",  "parity group", "deletion mark"};
    return kind < sizeof(names) / sizeof(names[0]) ? names[kind] : "unknown";
}

static ckd_status check_envelope(metadata_reader *n, metadata_kind kind, const ckd_id *store,
                                 const uint8_t *data, size_t size) {
    if (size < METADATA_ENVELOPE_MIN || memcmp(data, METADATA_MAGIC, 8) != 0) {
        return err_corrupt(n->err, n->path, 0, "this is not a metadata file of a store, or it is cut off");
    }
    if (!wire_hash_matches(load_le64(data + size - 8), hash64(data, size - 8))) {
        return err_corrupt(n->err, n->path, size - 8, "the metadata file's checksum does not match");
    }
    unsigned version = load_le16(data + 8), found = load_le16(data + 10);
    uint32_t known = kind == METADATA_MANIFEST ? METADATA_LOSSY | METADATA_OLDER | METADATA_SUSPECT
                     : kind == METADATA_PART   ? METADATA_TIMES | METADATA_OPTIONS
                     : kind == METADATA_POLICY ? METADATA_COMPACTION | METADATA_CALENDAR
                                               : 0;
    uint32_t unknown = load_le32(data + 12) & ~known;
    if (version != METADATA_VERSION) {
        return err_unsupported(n->err, n->path, 8,
                               "the metadata file has version %u, but this build reads %u: use a newer one",
                               version, METADATA_VERSION);
    }
    if (found != (unsigned)kind) {
        return err_unsupported(n->err, n->path, 10,
                               "the metadata file has kind %u (%s), but kind %u (%s) is expected", found,
                               kind_name(found), (unsigned)kind, kind_name((unsigned)kind));
    }
    if (unknown) {
        return err_unsupported(
            n->err, n->path, 12,
            "the metadata file needs features 0x%x, which this build lacks: use a newer one", unknown);
    }
    n->features = load_le32(data + 12);
    memcpy(n->store.bytes, data + 16, sizeof(n->store.bytes));
    if (store && memcmp(store, &n->store, sizeof(n->store)) != 0) {
        return err_corrupt(n->err, n->path, 16, "the metadata file belongs to another store");
    }
    n->generation = load_le32(data + 32);
    if (load_le32(data + METADATA_ENVELOPE_FRONT - 4) != size - METADATA_ENVELOPE_MIN) {
        return err_corrupt(n->err, n->path, METADATA_ENVELOPE_FRONT - 4,
                           "the metadata file's size is not that of its payload and envelope");
    }
    n->in = reader_of(data + METADATA_ENVELOPE_FRONT, size - METADATA_ENVELOPE_MIN);
    return CKD_OK;
}

metadata_reader metadata_open(metadata_kind kind, const ckd_id *store, const void *data, size_t size,
                              const char *path, ckd_error *err) {
    metadata_reader n = {.path = path, .err = err};
    n.status = check_envelope(&n, kind, store, data, size);
    n.in.failed = n.status != CKD_OK;
    return n;
}

void metadata_fail(metadata_reader *n, ckd_status status, const char *problem) {
    if (n->status == CKD_OK) {
        uint64_t at = METADATA_ENVELOPE_FRONT + n->in.at;
        n->status = status == CKD_E_UNSUPPORTED
                        ? err_unsupported(n->err, n->path, at, "%s: use a newer version", problem)
                        : err_corrupt(n->err, n->path, at, "%s", problem);
        n->in.failed = true;
    }
}

ckd_status metadata_close(metadata_reader *n, void *out, size_t size) {
    if (n->status == CKD_OK && n->in.failed) {
        metadata_fail(n, CKD_E_CORRUPT,
                      "the metadata file's payload ends early, or a text in it is not valid");
    } else if (reader_left(&n->in) != 0) {
        metadata_fail(n, CKD_E_CORRUPT, "the metadata file's payload has bytes after its last field");
    }
    if (n->status != CKD_OK && size > 0) {
        memset(out, 0, size);
    }
    return n->status;
}

/* ---- reading: fields ---- */

ckd_id metadata_take_id(metadata_reader *n) {
    ckd_id id = wire_id(&n->in);
    if (!n->in.failed && wire_id_zero(&id)) {
        metadata_fail(n, CKD_E_CORRUPT, "an identity is zero");
    }
    return id;
}

static bool run_char(char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-' || c == '~';
}

static void take_name(metadata_reader *n, char name[CKD_RUN_MAX + 1], bool may_be_empty,
                      const char *problem) {
    reader_string(&n->in, name, CKD_RUN_MAX + 1);
    bool valid = (name[0] || may_be_empty) && name[0] != '.' && name[0] != '-';
    for (const char *c = name; *c && valid; c++) {
        valid = run_char(*c);
    }
    if (!n->in.failed && !valid) {
        metadata_fail(n, CKD_E_CORRUPT, problem);
    }
}

void metadata_take_run(metadata_reader *n, char run[CKD_RUN_MAX + 1]) {
    take_name(n, run, false, "a run's name has invalid characters");
}

void metadata_take_any_run(metadata_reader *n, char run[CKD_RUN_MAX + 1]) {
    take_name(n, run, true, "a run's name has invalid characters");
}

void metadata_take_tag(metadata_reader *n, char tag[CKD_RUN_MAX + 1]) {
    take_name(n, tag, false, "a tag has invalid characters");
}

uint64_t metadata_take_step(metadata_reader *n) {
    uint64_t step = reader_u64(&n->in);
    if (step > INT64_MAX) {
        metadata_fail(n, CKD_E_CORRUPT, "a step is out of range");
        return 0;
    }
    return step;
}

file_ref metadata_take_file(metadata_reader *n) {
    file_ref f;
    f.id = metadata_take_id(n);
    f.rank = reader_u32(&n->in);
    f.size = reader_u64(&n->in);
    f.root = wire_hash(&n->in);
    return f;
}

void *metadata_take_array(metadata_reader *n, size_t *count, size_t item_size, size_t size) {
    uint32_t declared = reader_u32(&n->in);
    *count = 0;
    if (declared > reader_left(&n->in) / item_size) {
        metadata_fail(n, CKD_E_CORRUPT,
                      "the metadata file is too short for the number of entries it declares");
    }
    if (n->in.failed || declared == 0) {
        return NULL;
    }
    void *array = calloc(declared, size);
    if (!array) {
        n->in.failed = true;
        n->status = err_nomem(n->err, (size_t)declared * size, "a metadata file's entries");
        return NULL;
    }
    *count = declared;
    return array;
}

ckd_id *metadata_take_ids(metadata_reader *n, size_t *count) {
    ckd_id *ids = metadata_take_array(n, count, METADATA_ID_SIZE, sizeof(*ids));
    for (size_t i = 0; i < *count; i++) {
        ids[i] = metadata_take_id(n);
    }
    return ids;
}

file_ref *metadata_take_files(metadata_reader *n, size_t *count) {
    file_ref *files = metadata_take_array(n, count, METADATA_FILE_SIZE, sizeof(*files));
    for (size_t i = 0; i < *count; i++) {
        files[i] = metadata_take_file(n);
    }
    return files;
}

void metadata_check_no_generation(metadata_reader *n) {
    if (n->generation != 0) {
        metadata_fail(n, CKD_E_CORRUPT, "a metadata file of this kind has no generation");
    }
}

void metadata_check_rank(metadata_reader *n, uint32_t rank, uint32_t world) {
    if (!n->in.failed && rank >= world) {
        metadata_fail(n, CKD_E_CORRUPT, "a rank is not below the number of ranks");
    }
}

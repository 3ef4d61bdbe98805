/* Makes and prints JSON trees. json_list.c prints long lists of checkpoints without a tree. */
#include "cli/output/output.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output/checkpoint_fields.h"

json_t *cli_json_text(const char *text) {
    if (!text) {
        return json_null();
    }
    json_t *value = json_string(text);
    char *copy = value ? NULL : cli_utf8_copy(text);
    if (copy) {
        value = json_string(copy);
        free(copy);
    }
    return value;
}

json_t *cli_json_double(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *cli_json_ratio(uint64_t raw, uint64_t stored) {
    return raw && stored ? json_real((double)raw / (double)stored) : json_null();
}

json_t *cli_json_known(uint64_t size) {
    return size ? json_integer((json_int_t)size) : json_null();
}

json_t *cli_json_step(uint64_t step) {
    return step == CKD_LATEST ? json_null() : json_integer((json_int_t)step);
}

void cli_json_append(json_t **array, json_t *item) {
    if (!*array) {
        json_decref(item);
    } else if (json_array_append_new(*array, item) != 0) {
        json_decref(*array);
        *array = NULL;
    }
}

cli_ref_text cli_ref_text_of(const ckd_checkpoint *c) {
    cli_ref_text out;
    snprintf(out.text, sizeof(out.text), "%s@%" PRIu64, c->run, c->step);
    return out;
}

json_t *cli_json_checkpoint(const ckd_checkpoint *c, const ckd_checkpoint_list *all) {
    checkpoint_fields fields = {0};
    cli_ids ids = {.all = all};
    checkpoint_fields_make(&fields, c, &ids);
    json_t *object = json_object();
    for (size_t i = 0; i < CHECKPOINT_FIELDS && object; i++) {
        const json_field *f = &fields.items[i];
        json_t *value = f->kind == JSON_IS_TEXT     ? cli_json_text(f->text)
                        : f->kind == JSON_IS_NUMBER ? json_integer((json_int_t)f->number)
                        : f->kind == JSON_IS_REAL   ? json_real(f->real)
                                                    : json_null();
        if (json_object_set_new(object, f->name, value) != 0) {
            json_decref(object);
            object = NULL;
        }
    }
    return object;
}

cli_relatives cli_relatives_find(ckd_store *store) {
    static const ckd_checkpoint_list none;
    ckd_checkpoint_list *list;
    ckd_error err;
    if (ckd_store_list(&list, store, NULL, &err) != CKD_OK) {
        cli_note("the store's checkpoints cannot be listed, so parents are not named: %s%s%s", err.message,
                 err.file[0] ? ": " : "", err.file);
    }
    return (cli_relatives){list ? list : &none, list};
}

void cli_relatives_free(cli_relatives *r) {
    ckd_checkpoint_list_free(r->list);
}

json_t *cli_json_checkpoint_of(const ckd_checkpoint *c, ckd_store *store) {
    cli_relatives relatives = cli_relatives_find(store);
    json_t *object = cli_json_checkpoint(c, relatives.all);
    cli_relatives_free(&relatives);
    return object;
}

json_t *cli_json_one_checkpoint(const ckd_checkpoint *c, const ckd_checkpoint_list *all) {
    return json_pack("{s:i, s:[o]}", "schema", 1, "checkpoints", cli_json_checkpoint(c, all));
}

static void print_part(void *unused, const char *text, size_t size) {
    (void)unused;
    (void)fwrite(text, 1, size, stdout);
}

static int print(const char *text, size_t size, void *context) {
    cli_put_json(print_part, context, text, size);
    return ferror(stdout) ? -1 : 0;
}

static ckd_status print_with(json_t *root, size_t flags, ckd_error *err) {
    if (!root) {
        return cli_error_nomem(err);
    }
    bool printed = json_dump_callback(root, print, NULL, flags | JSON_REAL_PRECISION(17)) == 0;
    (void)putchar('\n');
    json_decref(root);
    return printed || ferror(stdout) ? CKD_OK : cli_error_nomem(err);
}

ckd_status cli_json_print(json_t *root, ckd_error *err) {
    return print_with(root, JSON_INDENT(2), err);
}

ckd_status cli_json_print_line(json_t *root, ckd_error *err) {
    return print_with(root, JSON_COMPACT, err);
}

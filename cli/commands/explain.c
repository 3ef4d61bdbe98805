/* Prints the plan of a load, as text or JSON, and loads nothing. Compares the bytes read with the bytes needed. */
#include "cli/commands/explain.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "cli/output/output.h"

/* Bytes read divided by bytes needed; NaN if none are needed. */
static double over_read(const ckd_load_reads *r) {
    return r->needed_bytes ? (double)r->read_bytes / (double)r->needed_bytes : NAN;
}

/* ---- JSON ---- */

static json_t *json_reads(const ckd_load_reads *r) {
    return json_pack("{s:I, s:I, s:I, s:o, s:I, s:I}", "raw_bytes", (json_int_t)r->raw_bytes, "needed_bytes",
                     (json_int_t)r->needed_bytes, "read_bytes", (json_int_t)r->read_bytes, "over_read",
                     cli_json_double(over_read(r)), "blocks", (json_int_t)r->blocks, "depth",
                     (json_int_t)r->depth);
}

static ckd_status print_json(const ckd_load_explanation *e, const ckd_load_request *requests,
                             const ckd_checkpoint *from, const ckd_checkpoint_list *all, ckd_error *err) {
    json_t *tensors = json_array(), *unexpected = json_array();
    for (size_t i = 0; i < e->count; i++) {
        json_t *item = json_reads(&e->requests[i]);
        if (item) {
            json_object_set_new(item, "name", cli_json_text(requests[i].name));
        }
        cli_json_append(&tensors, item);
    }
    for (size_t i = 0; i < e->difference_count; i++) {
        cli_json_append(&unexpected, cli_json_text(e->differences[i].tensor));
    }
    json_t *out = json_reads(&e->all);
    json_t *rest =
        json_pack("{s:i, s:[o], s:I, s:o, s:o}", "schema", 1, "checkpoints", cli_json_checkpoint(from, all),
                  "checkpoint_count", (json_int_t)e->checkpoints, "tensors", tensors, "left_out", unexpected);
    if (!out || !rest || json_object_update_new(out, rest) != 0) {
        json_decref(out);
        return cli_error_nomem(err);
    }
    return cli_json_print(out, err);
}

/* ---- text ---- */

static void print_all(const ckd_load_explanation *e, const ckd_checkpoint *from) {
    const ckd_load_reads *r = &e->all;
    printf("%s, nothing was loaded\n", cli_ref_text_of(from).text);
    printf("asked for     %s in %zu tensor%s\n", cli_text_size(r->raw_bytes).text, e->count,
           cli_plural(e->count));
    printf("needed        %s as stored\n", cli_text_size(r->needed_bytes).text);
    printf("to be read    %s in %" PRIu64 " block%s of %" PRIu64 " checkpoint%s",
           cli_text_size(r->read_bytes).text, r->blocks, cli_plural(r->blocks), e->checkpoints,
           cli_plural(e->checkpoints));
    if (r->needed_bytes) {
        printf(", %.2f times what is needed", over_read(r));
    }
    printf("\nchain depth   %" PRIu32 "\n", r->depth);
    if (e->difference_count) {
        printf("left out      %zu tensor%s\n", e->difference_count, cli_plural(e->difference_count));
    }
}

static ckd_status print_tensors(const ckd_load_explanation *e, const ckd_load_request *requests,
                                ckd_error *err) {
    putchar('\n');
    cli_table *t = cli_table_new("TENSOR|>ASKED FOR|>NEEDED|>TO BE READ|>BLOCKS|>DEPTH");
    for (size_t i = 0; i < e->count; i++) {
        const ckd_load_reads *r = &e->requests[i];
        cli_table_cell(t, "%s", requests[i].name);
        cli_table_cell(t, "%s", cli_text_size(r->raw_bytes).text);
        cli_table_cell(t, "%s", cli_text_size(r->needed_bytes).text);
        cli_table_cell(t, "%s", cli_text_size(r->read_bytes).text);
        cli_table_cell(t, "%" PRIu64, r->blocks);
        cli_table_cell(t, "%" PRIu32, r->depth);
    }
    return cli_table_print(t, err);
}

static ckd_status print_left_out(const ckd_load_explanation *e) {
    for (size_t i = 0; i < e->difference_count; i++) {
        fputs(i ? "  " : "\nleft out:\n  ", stdout);
        cli_print_clean(stdout, e->differences[i].tensor);
        putchar('\n');
    }
    return CKD_OK;
}

ckd_status cli_explain(ckd_load *load, ckd_store *store, const ckd_load_request *requests, size_t count,
                       const cli_options *options, ckd_error *err) {
    ckd_load_explanation *e;
    ckd_checkpoint_list *all = NULL;
    const ckd_checkpoint *from = ckd_load_checkpoint(load);
    ckd_status status = ckd_load_explain(&e, load, requests, count, err);
    if (status == CKD_OK && options->json) {
        status = ckd_store_list(&all, store, NULL, err);
        THEN(status, print_json(e, requests, from, all, err));
    } else if (status == CKD_OK && cli_prints_text(options)) {
        print_all(e, from);
        if (options->verbose) {
            status = print_tensors(e, requests, err);
            THEN(status, print_left_out(e));
        }
    }
    ckd_checkpoint_list_free(all);
    ckd_load_explanation_free(e);
    return status;
}

/*
 * Reads the user's storage prices, and turns bytes into money. A misspelt field is an error, as it would mean a price
 * of nothing.
 */
#include "cli/report/prices.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "cli/output/output.h"

#define FILE_MAX       (1 << 20) /* bytes per table */
#define TEXT_BYTES_MAX 100       /* bytes per name */
#define MONEY_MAX      8         /* bytes per currency name */
#define PRICE_MAX      1e9

static CLI_PRINTF(3, 4) ckd_status wrong(ckd_error *err, const char *path, const char *format, ...) {
    char message[256];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    return cli_error_at(err, CKD_E_INVALID, path, CKD_NO_OFFSET, "%s", message);
}

/* ---- fields ---- */

static ckd_status read_text(char **out, const json_t *value, const char *field, size_t max, const char *path,
                            ckd_error *err) {
    if (!json_is_string(value) || json_string_length(value) == 0 || json_string_length(value) > max ||
        strlen(json_string_value(value)) != json_string_length(value)) {
        return wrong(err, path, "the price table's \"%s\" must be a string of 1 to %zu bytes", field, max);
    }
    *out = cli_clean_copy(json_string_value(value));
    if (*out && strlen(*out) > max) {
        return wrong(err, path,
                     "the price table's \"%s\" has more than %zu bytes where control characters are escaped",
                     field, max);
    }
    return *out ? CKD_OK : cli_error_nomem(err);
}

static ckd_status read_price(double *out, const json_t *value, const char *field, const char *path,
                             ckd_error *err) {
    *out = value ? json_number_value(value) : NAN;
    if (value && (!json_is_number(value) || !(*out >= 0 && *out <= PRICE_MAX))) {
        return wrong(err, path, "the price table's \"%s\" must be a number from 0 to 10^9", field);
    }
    return CKD_OK;
}

/* Parses YYYY-MM-DD. */
static bool is_date(const char *text) {
    static const char pattern[] = "dddd-dd-dd";
    if (strlen(text) != sizeof(pattern) - 1) {
        return false;
    }
    for (size_t i = 0; pattern[i]; i++) {
        bool digit = text[i] >= '0' && text[i] <= '9';
        if (pattern[i] == 'd' ? !digit : text[i] != pattern[i]) {
            return false;
        }
    }
    return true;
}

/* Rejects unknown fields: a misspelt one would mean a price of nothing. */
static ckd_status check_fields(const json_t *root, const char *path, ckd_error *err) {
    static const char *const fields[] = {"name",          "date",          "currency", "per_gb_month",
                                         "per_1000_puts", "per_1000_gets", "note",     "egress_per_gb"};
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)root, key, value) {
        bool found = false;
        for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
            found = found || strcmp(fields[i], key) == 0;
        }
        if (!found) {
            return wrong(err, path, "the price table has an unknown field \"%.100s\"", key);
        }
    }
    return CKD_OK;
}

static ckd_status read_fields(cli_prices *p, const json_t *root, const char *path, ckd_error *err) {
    ckd_status status = check_fields(root, path, err);
    THEN(status, read_text(&p->name, json_object_get(root, "name"), "name", TEXT_BYTES_MAX, path, err));
    THEN(status, read_text(&p->date, json_object_get(root, "date"), "date", TEXT_BYTES_MAX, path, err));
    if (status == CKD_OK && !is_date(p->date)) {
        status = wrong(err, path, "the price table's \"date\" must be a day, as YYYY-MM-DD");
    }
    if (status == CKD_OK) {
        status = read_text(&p->currency, json_object_get(root, "currency"), "currency", MONEY_MAX, path, err);
    }
    const struct {
        const char *field;
        double *to;
    } prices[] = {{"per_gb_month", &p->per_gb_month},
                  {"per_1000_puts", &p->per_1000_puts},
                  {"per_1000_gets", &p->per_1000_gets},
                  {"egress_per_gb", &p->egress_per_gb}};
    for (size_t i = 0; i < 4 && status == CKD_OK; i++) {
        status = read_price(prices[i].to, json_object_get(root, prices[i].field), prices[i].field, path, err);
    }
    if (status == CKD_OK && isnan(p->per_gb_month)) {
        status = wrong(err, path, "the price table lacks \"per_gb_month\", what 10^9 bytes cost in a month");
    }
    return status;
}

/* ---- the file ---- */

static ckd_status read_json(json_t **out, const char *path, ckd_error *err) {
    FILE *file = fopen(path, "re");
    char *text = malloc(FILE_MAX + 1);
    json_error_t where;
    ckd_status status = CKD_OK;
    *out = NULL;
    if (!file) {
        status = cli_error_sys(err, errno, path, "cannot open the price table");
    } else if (!text) {
        status = cli_error_nomem(err);
    } else {
        size_t size = fread(text, 1, FILE_MAX + 1, file);
        if (ferror(file)) {
            status = cli_error_sys(err, errno, path, "cannot read the price table");
        } else if (size > FILE_MAX) {
            status = wrong(err, path, "the price table is larger than 1 MiB: it is some other file");
        } else if (!(*out = json_loadb(text, size, JSON_REJECT_DUPLICATES, &where))) {
            status =
                wrong(err, path, "the price table is not valid JSON: line %d: %s", where.line, where.text);
        } else if (!json_is_object(*out)) {
            status = wrong(err, path, "the price table must be a JSON object");
        }
    }
    if (file) {
        fclose(file);
    }
    free(text);
    return status;
}

ckd_status cli_prices_read(cli_prices **out, const char *path, ckd_error *err) {
    json_t *root = NULL;
    cli_prices *p = calloc(1, sizeof(*p));
    ckd_status status = p ? read_json(&root, path, err) : cli_error_nomem(err);
    THEN(status, read_fields(p, root, path, err));
    json_decref(root);
    if (status != CKD_OK) {
        cli_prices_free(p);
        p = NULL;
    }
    *out = p;
    return status;
}

void cli_prices_free(cli_prices *p) {
    if (p) {
        free(p->name);
        free(p->date);
        free(p->currency);
        free(p);
    }
}

const cli_prices *cli_prices_assumed(void) {
    static char name[] = "assumed", currency[] = "USD", date[] = "";
    static const cli_prices assumed = {.name = name,
                                       .date = date,
                                       .currency = currency,
                                       .per_gb_month = 0.02,
                                       .per_1000_puts = NAN,
                                       .per_1000_gets = NAN,
                                       .egress_per_gb = NAN};
    return &assumed;
}

/* ---- money ---- */

double cli_price_stored(const cli_prices *p, uint64_t bytes) {
    return (double)bytes / 1e9 * p->per_gb_month;
}

cli_money cli_money_text(const cli_prices *p, double amount) {
    cli_money out = {"-"};
    if (!isnan(amount)) {
        snprintf(out.text, sizeof(out.text), fabs(amount) < 0.995 && amount != 0 ? "%.2g %s" : "%.2f %s",
                 amount, p->currency);
    }
    return out;
}

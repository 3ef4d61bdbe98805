/* The shared credentials and config files: INI, with sections for profiles. */
#include "objects/s3/s3.h"

#include <stdio.h>
#include <stdlib.h>

enum { FILE_MAX = 1 << 20 };

void s3_profile_free(s3_profile *profile) {
    char **texts[] = {&profile->id,     &profile->secret,   &profile->token,    &profile->process,
                      &profile->region, &profile->endpoint, &profile->ca_bundle};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        if (*texts[i]) {
            explicit_bzero(*texts[i], strlen(*texts[i]));
        }
        free(*texts[i]);
    }
    *profile = (s3_profile){0};
}

typedef struct span {
    const char *at;
    size_t size;
} span;

static bool is_blank(char c) {
    return c == ' ' || c == '\t' || c == '\r';
}

static span trim(span s) {
    while (s.size > 0 && is_blank(s.at[0])) {
        s.at++;
        s.size--;
    }
    while (s.size > 0 && is_blank(s.at[s.size - 1])) {
        s.size--;
    }
    return s;
}

static bool equals(span s, const char *text) {
    return s.size == strlen(text) && memcmp(s.at, text, s.size) == 0;
}

/* Is `[...]` the section of the profile? */
static bool names_profile(span line, const char *name, bool config) {
    const char *end = memchr(line.at, ']', line.size);
    if (!end) {
        return false;
    }
    span section = trim((span){line.at + 1, (size_t)(end - line.at - 1)});
    if (!config || equals(section, "default")) {
        return equals(section, name);
    }
    if (section.size < 8 || memcmp(section.at, "profile", 7) != 0 || !is_blank(section.at[7])) {
        return false;
    }
    return equals(trim((span){section.at + 7, section.size - 7}), name);
}

static ckd_status set(char **to, span value, ckd_error *err) {
    if (*to || value.size == 0 || memchr(value.at, 0, value.size)) {
        return CKD_OK;
    }
    *to = calloc(1, value.size + 1);
    if (!*to) {
        return err_nomem(err, value.size, "a setting");
    }
    memcpy(*to, value.at, value.size);
    return CKD_OK;
}

/* `keys`: another file has given keys already. */
static ckd_status take(s3_profile *out, span line, bool keys, ckd_error *err) {
    const char *sign = memchr(line.at, '=', line.size);
    if (!sign) {
        return CKD_OK;
    }
    span name = trim((span){line.at, (size_t)(sign - line.at)});
    span value = trim((span){sign + 1, (size_t)(line.at + line.size - sign - 1)});
    const struct {
        const char *name;
        char **to;
    } known[] = {{"aws_access_key_id", &out->id},    {"aws_secret_access_key", &out->secret},
                 {"aws_session_token", &out->token}, {"credential_process", &out->process},
                 {"region", &out->region},           {"endpoint_url", &out->endpoint},
                 {"ca_bundle", &out->ca_bundle}};
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (equals(name, known[i].name)) {
            return keys && i < 3 ? CKD_OK /* one of the keys */
                                 : set(known[i].to, value, err);
        }
    }
    out->other = out->other || equals(name, "role_arn") || equals(name, "sso_session") ||
                 equals(name, "sso_start_url") || equals(name, "web_identity_token_file");
    return CKD_OK;
}

ckd_status s3_profile_parse(s3_profile *out, const char *name, bool config, const bytes *text, bool *found,
                            ckd_error *err) {
    const char *at = (const char *)text->data, *end = at + text->size;
    bool inside = false, keys = out->id || out->secret || out->token;
    ckd_status status = CKD_OK;
    while (text->size > 0 && at < end && status == CKD_OK) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        stop = stop ? stop : end;
        span line = trim((span){at, (size_t)(stop - at)});
        /* An indented line continues a nested setting, such as those of `s3 =`. */
        bool nested = at < stop && is_blank(*at);
        if (line.size > 0 && line.at[0] == '[') {
            inside = names_profile(line, name, config);
            *found = *found || inside;
        } else if (inside && !nested && line.size > 0 && line.at[0] != '#' && line.at[0] != ';') {
            status = take(out, line, keys, err);
        }
        at = stop + 1;
    }
    return status;
}

static ckd_status read_file(s3_profile *out, const char *name, const char *variable, const char *usual,
                            bool *found, ckd_error *err) {
    const char *path = secure_getenv(variable), *home = secure_getenv("HOME");
    char built[4096];
    if (!path || !*path) {
        if (!home || !*home || snprintf(built, sizeof(built), "%s/%s", home, usual) >= (int)sizeof(built)) {
            return CKD_OK;
        }
        path = built;
    }
    bytes text = {0};
    ckd_error why = {0};
    ckd_status status = file_read_all(&text, path, FILE_MAX, &why);
    if (status == CKD_OK) {
        status = s3_profile_parse(out, name, strcmp(variable, "AWS_CONFIG_FILE") == 0, &text, found, &why);
    }
    if (text.data) {
        explicit_bzero(text.data, text.size);
    }
    bytes_free(&text);
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

ckd_status s3_profile_read(s3_profile *out, const char *name, ckd_error *err) {
    const char *chosen = name && *name ? name : secure_getenv("AWS_PROFILE");
    bool named = chosen && *chosen, found = false;
    chosen = named ? chosen : "default";
    ckd_status status =
        read_file(out, chosen, "AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials", &found, err);
    THEN(status, read_file(out, chosen, "AWS_CONFIG_FILE", ".aws/config", &found, err));
    if (status == CKD_OK && named && !found) {
        status = err_set(
            err, CKD_E_NOT_FOUND,
            "there is no profile %.100s in ~/.aws/credentials or ~/.aws/config, nor in the files that "
            "AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE name",
            chosen);
    }
    return status;
}

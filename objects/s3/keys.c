/* Credentials: kept, copied, renewed; where they are looked for. */
#include "objects/s3/s3.h"

#include <stdio.h>
#include <stdlib.h>

#define RENEW_BEFORE_S UINT64_C(300)
#define RENEW_AGAIN_NS UINT64_C(10000000000) /* while the present ones are still valid */

static void forget(char *text) {
    if (text) {
        explicit_bzero(text, strlen(text));
    }
    free(text);
}

void s3_keys_free(s3_keys *keys) {
    forget(keys->id);
    forget(keys->secret);
    forget(keys->token);
    *keys = (s3_keys){0};
}

/* A line break in a token would end its header, and begin another one. */
static bool has_control(const char *text) {
    for (; text && *text; text++) {
        if ((unsigned char)*text < ' ' || *text == 0x7f) {
            return true;
        }
    }
    return false;
}

ckd_status s3_keys_set(s3_keys *out, const char *id, const char *secret, const char *token, ckd_error *err) {
    *out = (s3_keys){0};
    if (has_control(id) || has_control(secret) || has_control(token)) {
        return err_set(
            err, CKD_E_INVALID,
            "the access key, the secret key or the session token for S3 has a line break or another "
            "control character in it, perhaps at its end: remove it");
    }
    *out = (s3_keys){strdup(id), strdup(secret), token ? strdup(token) : NULL, 0, 0};
    if (!out->id || !out->secret || (token && !out->token)) {
        s3_keys_free(out);
        return err_nomem(err, 256, "credentials");
    }
    return CKD_OK;
}

/* ---- where they are looked for, in this order ---- */

static const char *variable(const char *name) {
    const char *value = secure_getenv(name);
    return value && *value ? value : NULL;
}

/* Each finder leaves `out` empty if its place has no keys. */
static ckd_status from_environment(s3_wallet *w, s3_keys *out, ckd_error *err) {
    const char *id = variable("AWS_ACCESS_KEY_ID"), *secret = variable("AWS_SECRET_ACCESS_KEY");
    if (w->profile_given || !id || !secret) {
        return CKD_OK;
    }
    return s3_keys_set(out, id, secret, variable("AWS_SESSION_TOKEN"), err);
}

static ckd_status from_files(s3_wallet *w, s3_keys *out, ckd_error *err) {
    s3_profile profile = {0};
    ckd_status status = s3_profile_read(&profile, w->profile, err);
    if (status == CKD_OK && profile.id && profile.secret) {
        status = s3_keys_set(out, profile.id, profile.secret, profile.token, err);
    } else if (status == CKD_OK && profile.process) {
        status = s3_process_keys(out, profile.process, err);
    } else if (status == CKD_OK && profile.other) {
        status =
            err_set(err, CKD_E_UNSUPPORTED,
                    "the profile uses a role or a single sign-on, which ckptdelta does not support: set its "
                    "credential_process to `aws configure export-credentials --format process`");
    }
    s3_profile_free(&profile);
    return status;
}

static ckd_status find_keys(s3_wallet *w, s3_keys *out, ckd_error *err) {
    ckd_error container = {0}, instance = {0};
    ckd_status status = from_environment(w, out, err);
    if (status == CKD_OK && !out->id) {
        status = from_files(w, out, err);
    }
    if (status != CKD_OK || out->id) {
        return status;
    }
    /* The sources below would give the keys of another role than the one that was meant. */
    if (variable("AWS_WEB_IDENTITY_TOKEN_FILE")) {
        return err_set(
            err, CKD_E_UNSUPPORTED,
            "AWS_WEB_IDENTITY_TOKEN_FILE asks for a role by a web identity, which ckptdelta does not "
            "support: set the credential_process of a profile to `aws configure export-credentials "
            "--format process`");
    }
    status = s3_container_keys(out, &container);
    if (status != CKD_E_NOT_FOUND) {
        return err_from(err, status, &container);
    }
    status = s3_instance_keys(out, &instance);
    if (status != CKD_E_NOT_FOUND) {
        return err_from(err, status, &instance);
    }
    return err_set(
        err, CKD_E_STATE,
        "no credentials for S3: neither in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor in profile %.60s of "
        "~/.aws/credentials or ~/.aws/config; %.120s; %.120s",
        w->profile                ? w->profile
        : variable("AWS_PROFILE") ? variable("AWS_PROFILE")
                                  : "default",
        container.message, instance.message);
}

/* ---- the present ones ---- */

ckd_status s3_wallet_open(s3_wallet *w, const char *profile, ckd_error *err) {
    pthread_mutex_init(&w->mutex, NULL);
    w->profile_given = profile && *profile;
    w->profile = w->profile_given ? strdup(profile) : NULL;
    return w->profile_given && !w->profile ? err_nomem(err, 64, "the name of a profile") : CKD_OK;
}

void s3_wallet_close(s3_wallet *w) {
    s3_keys_free(&w->keys);
    free(w->profile);
    pthread_mutex_destroy(&w->mutex);
}

static bool lasts(const s3_keys *keys, uint64_t margin_s) {
    return keys->id && (keys->expires_s == 0 || keys->expires_s > clock_wall_ns() / 1000000000 + margin_s);
}

/* Called with the mutex: other threads wait for the same keys. Old ones serve as long as they are valid. */
static ckd_status renew(s3_wallet *w, ckd_error *err) {
    uint64_t now = clock_monotonic_ns();
    if (lasts(&w->keys, 0) && w->renewed_ns && now - w->renewed_ns < RENEW_AGAIN_NS) {
        return CKD_OK;
    }
    s3_keys found = {0};
    ckd_error why = {0};
    ckd_status status = find_keys(w, &found, &why);
    w->renewed_ns = now;
    if (status == CKD_OK) {
        found.serial = w->keys.serial + 1;
        s3_keys_free(&w->keys);
        w->keys = found;
    } else if (lasts(&w->keys, 0)) {
        return CKD_OK;
    }
    return err_from(err, status, &why);
}

ckd_status s3_wallet_keys(s3_wallet *w, s3_keys *out, ckd_error *err) {
    *out = (s3_keys){0};
    pthread_mutex_lock(&w->mutex);
    ckd_status status = lasts(&w->keys, RENEW_BEFORE_S) ? CKD_OK : renew(w, err);
    THEN(status, s3_keys_set(out, w->keys.id, w->keys.secret, w->keys.token, err));
    out->serial = w->keys.serial;
    pthread_mutex_unlock(&w->mutex);
    return status;
}

void s3_wallet_renew(s3_wallet *w, uint64_t serial) {
    pthread_mutex_lock(&w->mutex);
    if (w->keys.serial == serial) {
        w->keys.expires_s = 1;
    }
    pthread_mutex_unlock(&w->mutex);
}

{{- define "kvist.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $both := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $both .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "kvist.operator" -}}
{{ include "kvist.fullname" . }}-operator
{{- end }}

{{- define "kvist.test" -}}
{{ include "kvist.fullname" . }}-test
{{- end }}

{{/* The selector labels of a component's pods; immutable. */}}
{{- define "kvist.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "kvist.common" -}}
app.kubernetes.io/part-of: kvist
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvist.labels" -}}
{{ include "kvist.selector" . }}
{{ include "kvist.common" . }}
{{- end }}

{{- define "kvist.testLabels" -}}
{{ include "kvist.selector" . | replace "component: operator" "component: test" }}
{{ include "kvist.common" . }}
{{- end }}

{{- define "kvist.modelHeader" -}}
{{ include "kvist.fullname" . }}-model-header
{{- end }}

{{- define "kvist.modelHeaderSelector" -}}
{{ include "kvist.selector" . | replace "component: operator" "component: model-header" }}
{{- end }}

{{- define "kvist.modelHeaderLabels" -}}
{{ include "kvist.modelHeaderSelector" . }}
{{ include "kvist.common" . }}
{{- end }}

{{- define "kvist.serviceAccount" -}}
{{- $made := .Values.serviceAccount.create | ternary (include "kvist.operator" .) "default" -}}
{{- default $made .Values.serviceAccount.name -}}
{{- end }}

{{/* An image reference: registry, repository, digest or tag. Takes a list of the root and the image's values. */}}
{{- define "kvist.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $root.Values.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default $root.Chart.AppVersion $image.tag }}{{ end -}}
{{- end }}

{{/* The namespace in which `helm test` creates a pool: one that the operator manages. */}}
{{- define "kvist.testNamespace" -}}
{{- with .Values.watchNamespaces }}{{ first . }}{{ else }}{{ .Release.Namespace }}{{ end -}}
{{- end }}

{{- /* Security context of pods; without the default user ids on OpenShift, which assigns its own. */}}
{{- define "kvist.podSecurity" -}}
{{- $context := .Values.podSecurityContext }}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}
{{- range list "runAsUser" "runAsGroup" "fsGroup" }}
{{- if eq (toString (get $context .)) "65532" }}
{{- $context = omit $context . }}
{{- end }}
{{- end }}
{{- end }}
{{- toYaml $context }}
{{- end }}
